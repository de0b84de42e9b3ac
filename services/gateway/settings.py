"""Settings of the gateway."""

from __future__ import annotations

import socket
from pathlib import Path  # noqa: TC003 - pydantic reads annotations
from typing import TYPE_CHECKING

from pydantic import Field, HttpUrl, IPvAnyNetwork, model_validator

from shared.contracts.frames import FRAME_BYTES
from shared.settings import AuthSettings, KafkaSettings, LogSettings, PostgresSettings, RedisSettings, Settings

if TYPE_CHECKING:
    from pydantic import SecretStr


class GatewaySettings(Settings, PostgresSettings, KafkaSettings, RedisSettings, AuthSettings, LogSettings):
    """What the gateway reads from the environment."""

    gateway_port: int = Field(8400, ge=0, le=65535, description="Port of the sockets.")
    gateway_private_port: int = Field(9400, ge=0, le=65535, description="Port of health and metrics.")
    gateway_name: str = Field(
        default_factory=socket.gethostname, description="Name of this gateway in Redis; by default the host's."
    )
    ingest_url: HttpUrl = Field(HttpUrl("http://127.0.0.1:8401"), description="Address of ingest.")

    gateway_processes: int = Field(1, ge=1, le=64, description="Processes of this gateway behind one port.")
    gateway_tls_certificate: Path | None = Field(None, description="File of the certificate chain; none: no TLS here.")
    gateway_tls_key: Path | None = Field(None, description="File of the certificate's key.")

    gateway_frame_bytes: int = Field(FRAME_BYTES, ge=1024, le=1024 * 1024, description="Largest frame after `hello`.")
    gateway_window: int = Field(256, ge=1, le=10_000, description="Most unacknowledged events of a session.")
    gateway_resend_s: float = Field(5.0, gt=0, le=300, description="Seconds until an unacknowledged event goes again.")
    gateway_resends: int = Field(5, ge=0, le=20, description="How often it goes again before the session is closed.")
    gateway_heartbeat_s: float = Field(25.0, gt=0, le=600, description="Seconds between pings.")
    gateway_hello_s: float = Field(10.0, gt=0, le=60, description="Seconds that a client has for its `hello`.")
    gateway_send_timeout_s: float = Field(5.0, gt=0, le=60, description="Seconds that a send may take.")
    gateway_send_queue: int = Field(20_000, ge=1, description="Most sends that wait for ingest.")
    gateway_send_queue_bytes: int = Field(
        64 * 1024 * 1024, ge=1024 * 1024, description="Most bytes of bodies of sends that ingest has not answered."
    )
    gateway_session_sends: int = Field(1_000, ge=1, description="Most sends of one session that wait for ingest.")
    gateway_session_send_bytes: int = Field(
        4 * 1024 * 1024, ge=1, description="Bytes of their bodies from which on the session's frames wait."
    )
    gateway_buffer_bytes: int = Field(
        64 * 1024,
        ge=16 * 1024,
        description="What may wait here to be written to a socket before its session reads later.",
    )
    gateway_send_buffer_bytes: int = Field(
        36 * 1024, ge=0, description="The same in the kernel, which doubles it. 0 leaves it to the kernel."
    )
    gateway_page: int = Field(100, ge=1, le=500, description="Most events of one catch-up read.")
    gateway_reads: int = Field(4, ge=1, le=100, description="Most catch-up reads at a time.")
    gateway_ring: int = Field(256, ge=0, le=10_000, description="Most recent events of a conversation that are kept.")
    gateway_ring_bytes: int = Field(
        64 * 1024 * 1024, ge=0, description="What the recent events of all conversations may take, about."
    )
    gateway_linger_s: float = Field(
        120.0, ge=0, description="How long a conversation's recent events are kept after its last session."
    )
    gateway_sweep_s: float = Field(
        5.0, gt=0, le=300, description="Seconds between sweeps: what Kafka did not bring is found after at most two."
    )
    gateway_ack_flush_ms: int = Field(
        10, ge=0, le=1000, description="How long acks are gathered before Kafka, at least."
    )
    gateway_group_ack_ms: int = Field(
        1000, ge=0, le=60_000, description="The same in groups, where whoever watches hears of it once a second."
    )
    gateway_ack_refresh_s: float = Field(
        300.0, gt=0, description="How often a session's acked ranges go out again, and read marks that have no answer."
    )
    gateway_drain_s: float = Field(
        5.0, ge=0, le=300, description="On SIGTERM, the time over which sessions are told to come back elsewhere."
    )

    gateway_origins: tuple[str, ...] = Field(
        (), description="Origins that browsers may connect from, as a JSON list; empty: all."
    )
    gateway_trusted_proxies: tuple[IPvAnyNetwork, ...] = Field(
        (), description="Networks of proxies whose `X-Forwarded-For` is believed, as a JSON list."
    )
    gateway_connections: int = Field(0, ge=0, description="Most connections of a process; 0: no limit.")
    gateway_address_connections: int = Field(
        0, ge=0, description="Most connections of one address, an IPv6 one as its /64; 0: no limit."
    )
    gateway_user_sessions: int = Field(100, ge=1, description="Most sessions of one user in a process.")
    gateway_typing_most: int = Field(
        500, ge=0, description="In conversations with more local sessions nobody is told who types."
    )
    gateway_presence_grace_s: float = Field(
        10.0, ge=0, le=300, description="How long a user without a session still counts as online."
    )
    gateway_frames_per_s: float = Field(200.0, ge=0, description="Frames of a session per second; 0: no limit.")
    gateway_frames_burst: int = Field(2_000, ge=1, description="Frames that a session may save up.")
    gateway_sends_per_s: float = Field(
        50.0, ge=0, description="Sends of a session, and of a user, per second; 0: no limit."
    )
    gateway_sends_burst: int = Field(500, ge=1, description="Sends that it may save up.")
    gateway_pulls_per_s: float = Field(
        20.0, ge=0, description="Pulls, watches, `receipts` and marks that need a read, per second; 0: no limit."
    )
    gateway_pulls_burst: int = Field(100, ge=1, description="Pulls that may be saved up.")
    gateway_creates_per_s: float = Field(5.0, ge=0, description="Conversations made per second; 0: no limit.")
    gateway_creates_burst: int = Field(50, ge=1, description="Creates that may be saved up.")
    gateway_presence_per_s: float = Field(1.0, ge=0, description="`presence` frames per second; 0: no limit.")
    gateway_presence_burst: int = Field(10, ge=1, description="`presence` frames that may be saved up.")

    @model_validator(mode="after")
    def _certificate_and_key(self) -> GatewaySettings:
        if (self.gateway_tls_certificate is None) != (self.gateway_tls_key is None):
            raise ValueError("WAYBILL_GATEWAY_TLS_CERTIFICATE and WAYBILL_GATEWAY_TLS_KEY go together")
        return self

    @property
    def secret(self) -> SecretStr:
        """The secret of the tokens that the gateway shows to ingest."""
        if self.auth_secret is None:
            raise ValueError("WAYBILL_AUTH_SECRET is needed by the gateway for its calls to ingest")
        return self.auth_secret
