"""Settings of ingest."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, HttpUrl, SecretStr, model_validator

from shared.contracts.body import MAX_BYTES
from shared.settings import AuthSettings, PostgresSettings, Settings

_MOST_WINDOW_S = 100 * 365 * 86_400
"""What lies further back than the store can name a time would fail every send."""


class IngestSettings(Settings, PostgresSettings, AuthSettings):
    """What ingest needs to run."""

    ingest_port: int = Field(8401, ge=0, le=65535, description="Public port of ingest.")
    ingest_private_port: int = Field(9401, ge=0, le=65535, description="Port of ingest's health and metrics.")
    digest_key: SecretStr = Field(
        min_length=16,
        description="Key of the digests by which a repeated client_msg_id is judged. Never changed: all ingest "
        "processes have the same one for the life of the store.",
    )
    ingest_lanes: int = Field(
        4, ge=1, le=64, description="Writer lanes, each with a part of the shards and one connection."
    )
    ingest_gather_ms: float = Field(1.0, ge=0, le=100, description="How long a lane gathers sends, in milliseconds.")
    ingest_batch_items: int = Field(500, ge=1, le=5000, description="Most sends in one transaction.")
    ingest_batch_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="Most bytes of bodies in one transaction.")
    ingest_queue_items: int = Field(
        10_000, ge=500, description="Most sends that wait in this process; beyond it requests get `unavailable`."
    )
    ingest_queue_bytes: int = Field(
        128 * 1024 * 1024, ge=64 * 1024, description="Most bytes of bodies that wait in this process."
    )
    ingest_send_timeout_s: float = Field(5.0, gt=0, le=60, description="After this many seconds a send gets `timeout`.")
    ingest_max_body_bytes: int = Field(MAX_BYTES, ge=2, le=512 * 1024, description="Most bytes of an event's body.")
    ingest_max_request_bytes: int = Field(
        36 * 1024 * 1024, ge=1024, description="Most bytes of an HTTP request's body: 500 events of the largest size."
    )
    ingest_edit_window_s: float | None = Field(
        None,
        ge=0,
        le=_MOST_WINDOW_S,
        description="For how many seconds a sender may edit a message; not set: for ever.",
    )
    ingest_recall_window_s: float | None = Field(
        None,
        ge=0,
        le=_MOST_WINDOW_S,
        description="For how many seconds a sender may recall or delete a message; not set: for ever. A group's admins "
        "may at any time.",
    )
    ingest_group_size: int = Field(10_000, ge=2, description="Most members of a group.")
    ingest_edit_history: Literal["admins", "members", "off"] = Field(
        "admins",
        description="Who may read the earlier texts of an edited message: the group's `admins`, its `members`, or "
        "nobody (`off`). Services always may.",
    )
    moderation_url: HttpUrl | None = Field(
        None, description="Where messages and edits are judged before they are written; unset: nothing is."
    )
    moderation_timeout_ms: int = Field(500, ge=1, le=4000, description="How long the moderation hook may take.")
    moderation_when_away: Literal["open", "closed"] = Field(
        "closed",
        description="Without an answer of the moderation hook: `open` writes, `closed` answers `unavailable`.",
    )

    @model_validator(mode="after")
    def _room_for_reads(self) -> IngestSettings:
        if self.postgres_pool <= self.ingest_lanes:
            raise ValueError(
                "WAYBILL_POSTGRES_POOL must be larger than WAYBILL_INGEST_LANES: reads need a connection, too"
            )
        return self
