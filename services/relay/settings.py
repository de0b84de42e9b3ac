"""What a relay can be told by its environment."""

from __future__ import annotations

import os
import secrets
import socket

from pydantic import Field, field_validator, model_validator

from services.relay.breaker import Limits
from services.relay.lease import Timing
from services.relay.redrive import Window
from services.relay.retention import Periods
from services.relay.retries import Retries
from shared.settings import ErasureSettings, KafkaSettings, LogSettings, PostgresSettings, Settings


def _unique_owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class RelaySettings(Settings, PostgresSettings, KafkaSettings, LogSettings, ErasureSettings):
    """All of the relay's."""

    relay_private_port: int = Field(9403, ge=0, le=65535, description="Port of health and metrics.")
    relay_owner: str = Field(
        default_factory=_unique_owner,
        min_length=1,
        max_length=200,
        description=(
            "Name that leases are held under. A stable one (a slot, never shared by two relays at a time) lets a "
            "restarted relay take its shards back at once instead of waiting for their leases to end; default: unique."
        ),
    )
    relay_batch_size: int = Field(500, ge=1, le=10_000, description="Most rows of one shard in one batch to Kafka.")
    relay_fixed_delay_ms: int = Field(
        10, ge=1, le=10_000, description="Longest wait between two looks at an idle outbox, in milliseconds."
    )
    relay_sending_stale_ms: int = Field(
        15_000,
        ge=500,
        le=600_000,
        description=(
            "Length of a lease in milliseconds: for so long after a relay's last sign of life its shards wait. Must be "
            "longer than the longest possible delivery."
        ),
    )
    relay_delivery_timeout_ms: int = Field(
        8_000,
        ge=200,
        le=300_000,
        description=(
            "For how long a batch may be with the Kafka client, its retries included, in milliseconds. A batch that "
            "is not confirmed by then counts as failed: the client is replaced and the batch sent again."
        ),
    )
    relay_unsent_limit_ms: int = Field(
        30_000, ge=100, description="Age of the oldest unsent row, in milliseconds, from which on `readyz` fails."
    )

    relay_enabled: bool = Field(
        True, description="Whether this relay publishes. Off, it takes no shard, and only its private port answers."
    )
    relay_max_attempts: int = Field(
        8,
        ge=1,
        le=100,
        description="How often a refused row is tried in all, the first time included, before it is a dead letter.",
    )
    relay_retry_delay_ms: int = Field(
        5_000, ge=1, le=86_400_000, description="Wait before a refused row is tried again, in milliseconds."
    )
    relay_retry_factor: float = Field(4.0, ge=1, le=100, description="By how much that wait grows with each try.")
    relay_retry_cap_ms: int = Field(
        1_800_000, ge=1, le=86_400_000, description="The longest such wait, in milliseconds."
    )
    relay_breaker_share: float = Field(
        0.2,
        ge=0,
        le=1,
        description=(
            "A shard stops, and keeps its rows, when more than this share of the rows of the last seconds is refused: "
            "then the fault is hardly theirs. 1 turns that off."
        ),
    )
    relay_breaker_least: int = Field(10, ge=1, description="So many refused rows at least stop a shard.")
    relay_breaker_window_ms: int = Field(
        60_000, ge=1_000, le=3_600_000, description="The time over which that share is taken, in milliseconds."
    )
    relay_redrive_window: str | None = Field(
        None,
        description=(
            "Time of the day, `HH:MM-HH:MM` in UTC, in which dead letters are tried again by themselves, each once a "
            "day; not set: only when somebody asks."
        ),
    )
    relay_redrive_cap: int = Field(
        1_000, ge=1, le=1_000_000, description="At most so many dead letters are tried again in one such time."
    )

    relay_outbox_period_s: int = Field(
        86_400,
        ge=60,
        description=(
            "For how long ids are drawn in one partition of the outbox, in seconds: what is deleted is forgotten in "
            "whole partitions."
        ),
    )
    relay_outbox_retention_s: int = Field(
        518_400,
        ge=60,
        description=(
            "For how long published rows stay in the outbox, in seconds; a reader of Kafka can be served again from "
            "there. Rows that are not published, or parked, stay longer."
        ),
    )
    relay_dead_letter_retention_s: int = Field(
        2_592_000,
        ge=3_600,
        description=(
            "For how long a dead letter is kept once it is settled, or since it died if nobody settles it, in seconds."
        ),
    )

    transition_retention_s: int = Field(
        2_592_000,
        ge=3_600,
        description=(
            "For how long a day of the log of state changes (`transition`) is kept after its end, in seconds. The "
            "relay drops it."
        ),
    )

    @property
    def periods(self) -> Periods:
        """How long things last."""
        return Periods(
            self.relay_outbox_period_s,
            self.relay_outbox_retention_s,
            self.relay_dead_letter_retention_s,
            self.transition_retention_s,
        )

    @property
    def limits(self) -> Limits:
        """When a shard stops."""
        return Limits(self.relay_breaker_share, self.relay_breaker_least, self.relay_breaker_window_ms / 1000)

    @property
    def retries(self) -> Retries:
        """When a refused row is tried again."""
        return Retries(
            self.relay_max_attempts, self.relay_retry_delay_ms, self.relay_retry_factor, self.relay_retry_cap_ms
        )

    @property
    def redrive(self) -> Window | None:
        """When dead letters are tried again by themselves."""
        return None if self.relay_redrive_window is None else Window.parse(self.relay_redrive_window)

    @field_validator("relay_redrive_window")
    @classmethod
    def _window(cls, value: str | None) -> str | None:
        if value is not None:
            Window.parse(value)
        return value

    @property
    def timing(self) -> Timing:
        """The rules of time that a lease follows."""
        return Timing(self.relay_sending_stale_ms / 1000, self.relay_delivery_timeout_ms / 1000)

    @model_validator(mode="after")
    def _forgets_in_time(self) -> RelaySettings:
        if self.relay_outbox_retention_s + self.relay_outbox_period_s > self.erase_within_s:
            raise ValueError(
                "WAYBILL_ERASE_WITHIN_S: the outbox keeps a row for WAYBILL_RELAY_OUTBOX_RETENTION_S and "
                "WAYBILL_RELAY_OUTBOX_PERIOD_S, which is longer"
            )
        return self

    @model_validator(mode="after")
    def _lease_outlasts_delivery(self) -> RelaySettings:
        if problem := self.timing.problem():
            raise ValueError(f"WAYBILL_RELAY_SENDING_STALE_MS: {problem}")
        return self
