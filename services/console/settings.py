"""Settings of the console, and of the commands that are told by environment."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, HttpUrl, PostgresDsn, RedisDsn, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared.settings import PREFIX, AuthSettings, ErasureSettings, PostgresSettings, Settings

_DEFAULT = {
    "ingest": "http://127.0.0.1:9401",
    "relay": "http://127.0.0.1:9403",
    "gateway": "http://127.0.0.1:9400",
    "receipts": "http://127.0.0.1:9404",
    "console": "http://127.0.0.1:9402",
}


class ConsoleSettings(Settings, PostgresSettings, AuthSettings):
    """What the console reads from the environment."""

    console_port: int = Field(8402, ge=0, le=65535, description="Port of the page and its API.")
    console_private_port: int = Field(9402, ge=0, le=65535, description="Port of health and metrics.")
    console_services: Annotated[dict[str, HttpUrl], NoDecode] = Field(
        default_factory=lambda: {name: HttpUrl(url) for name, url in _DEFAULT.items()},
        description="Private addresses of the services to look at: `name=http://host:port`, with commas between.",
    )

    @field_validator("console_services", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [part.strip().partition("=") for part in value.split(",") if part.strip()]
        if any(not name or not url for name, _, url in pairs):
            raise ValueError("expected name=http://host:port, with commas between")
        return {name.strip(): url.strip() for name, _, url in pairs}


class CommandSettings(BaseSettings):
    """What `waybill check`, `waybill dead`, `waybill relay` and `waybill revoke` read from the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True)

    postgres_url: PostgresDsn | None = Field(
        None, description="Address of Postgres with the console's role in it; else that of a running `waybill up`."
    )
    redis_url: RedisDsn | None = Field(
        None, description="Address of Redis, to tell gateways at once; if Postgres' is not set, that of the same stack."
    )
    topic_prefix: str = Field(
        "waybill", pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="What the topics' names, and channels', begin with."
    )
    log_level: str = Field(
        "warning", pattern="^(debug|info|warning|error)$", description="Least level that is logged on standard error."
    )


class MigrateSettings(ErasureSettings):
    """What `waybill migrate` reads from the environment."""

    postgres_owner_url: PostgresDsn = Field(
        description="Address of Postgres with a role that may create roles; not through a pooler."
    )
    role_password: SecretStr | None = Field(None, description="Password that the services' roles get.")
    kafka_bootstrap: str | None = Field(None, description="If set, the topics are made, too.")
    topic_prefix: str = Field(
        "waybill", pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="What the topics' names begin with."
    )
    kafka_replication: int = Field(1, ge=1, le=9, description="Copies of each topic that is made; 3 on a cluster.")
    kafka_min_insync: int = Field(1, ge=1, le=9, description="Copies that must have a record; 2 on a cluster.")
