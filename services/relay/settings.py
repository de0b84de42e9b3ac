"""What a relay can be told by its environment."""

from __future__ import annotations

import os
import secrets
import socket

from pydantic import Field, model_validator

from services.relay.lease import Timing
from shared.settings import KafkaSettings, PostgresSettings, Settings


def _unique_owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class RelaySettings(Settings, PostgresSettings, KafkaSettings):
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

    @property
    def timing(self) -> Timing:
        """The rules of time that a lease follows."""
        return Timing(self.relay_sending_stale_ms / 1000, self.relay_delivery_timeout_ms / 1000)

    @model_validator(mode="after")
    def _lease_outlasts_delivery(self) -> RelaySettings:
        if problem := self.timing.problem():
            raise ValueError(f"WAYBILL_RELAY_SENDING_STALE_MS: {problem}")
        return self
