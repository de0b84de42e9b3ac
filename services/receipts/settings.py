"""Settings of the receipts service."""

from __future__ import annotations

from pydantic import Field

from shared.settings import KafkaSettings, PostgresSettings, Settings


class ReceiptsSettings(Settings, PostgresSettings, KafkaSettings):
    """What this process needs."""

    receipts_private_port: int = Field(9404, ge=0, le=65535, description="Port of health and metrics.")
    receipts_batch_records: int = Field(4000, ge=1, le=20_000, description="Most acks that one transaction applies.")
    receipts_batch_bytes: int = Field(
        1024 * 1024,
        ge=1024,
        le=16 * 1024 * 1024,
        description="About the most bytes of acks that one transaction applies.",
    )
    receipts_batch_ms: int = Field(
        5, ge=0, le=1000, description="How long the first ack of a batch waits for others, in milliseconds."
    )
    receipts_large_group: int = Field(
        100, ge=1, description="Of groups with more members, marks are announced folded, each member's once a period."
    )
    receipts_announce_ms: int = Field(
        1000, ge=50, le=60_000, description="The period of announcing marks of large groups, in milliseconds."
    )
    receipts_breaker_share: float = Field(
        0.5, gt=0, le=1, description="Share of unreadable acks over which the service stops and reports."
    )
    receipts_breaker_least: int = Field(
        100, ge=1, description="Least number of unreadable acks before their share can stop the service."
    )
    receipts_breaker_window: int = Field(1000, ge=1, description="How many of the last acks the share is taken of.")
    receipts_instance: str | None = Field(
        None,
        pattern=r"^[a-zA-Z0-9._-]{1,64}$",
        description="Name of this process among the receipts services, the same after a restart and given to no other:"
        " killed and started again, it goes on at once instead of after Kafka's session timeout of 10 s. But when it"
        " ends for good, others take over only after that time. Without it, it is the other way round.",
    )
