"""Settings of the gateway."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from pydantic import Field, HttpUrl

from shared.contracts.frames import FRAME_BYTES
from shared.settings import AuthSettings, KafkaSettings, PostgresSettings, RedisSettings, Settings

if TYPE_CHECKING:
    from pydantic import SecretStr


class GatewaySettings(Settings, PostgresSettings, KafkaSettings, RedisSettings, AuthSettings):
    """What the gateway reads from the environment."""

    gateway_port: int = Field(8400, ge=0, le=65535, description="Port of the sockets.")
    gateway_private_port: int = Field(9400, ge=0, le=65535, description="Port of health and metrics.")
    gateway_name: str = Field(
        default_factory=socket.gethostname, description="Name of this gateway in Redis; by default the host's."
    )
    ingest_url: HttpUrl = Field(HttpUrl("http://127.0.0.1:8401"), description="Address of ingest.")

    gateway_frame_bytes: int = Field(FRAME_BYTES, ge=1024, le=1024 * 1024, description="Largest frame after `hello`.")
    gateway_window: int = Field(256, ge=1, le=10_000, description="Most unacknowledged events of a session.")
    gateway_resend_s: float = Field(5.0, gt=0, le=300, description="Seconds until an unacknowledged event goes again.")
    gateway_resends: int = Field(5, ge=0, le=20, description="How often it goes again before the session is closed.")
    gateway_heartbeat_s: float = Field(25.0, gt=0, le=600, description="Seconds between pings.")
    gateway_hello_s: float = Field(10.0, gt=0, le=60, description="Seconds that a client has for its `hello`.")
    gateway_send_timeout_s: float = Field(5.0, gt=0, le=60, description="Seconds that a send may take.")
    gateway_send_queue: int = Field(20_000, ge=1, description="Most sends that wait for ingest.")
    gateway_session_sends: int = Field(1_000, ge=1, description="Most sends of one session that wait for ingest.")
    gateway_buffer_bytes: int = Field(
        1024 * 1024, ge=64 * 1024, description="What may wait to be written to a socket before its session reads later."
    )
    gateway_page: int = Field(100, ge=1, le=500, description="Most events of one catch-up read.")
    gateway_ack_flush_ms: int = Field(10, ge=0, le=1000, description="How long acks are gathered before Kafka.")
    gateway_ack_refresh_s: float = Field(300.0, gt=0, description="How often a session's acked ranges go out again.")
    gateway_drain_s: float = Field(
        5.0, ge=0, le=300, description="On SIGTERM, the time over which clients are told to come back elsewhere."
    )

    @property
    def secret(self) -> SecretStr:
        """The secret of the tokens that the gateway shows to ingest."""
        if self.auth_secret is None:
            raise ValueError("WAYBILL_AUTH_SECRET is needed by the gateway for its calls to ingest")
        return self.auth_secret
