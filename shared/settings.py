"""Settings from the environment: `WAYBILL_…`, checked once at the start, handed down as one frozen object.

Each service adds its own in its ``settings.py``. Every field's description is its documentation:
docs/reference/settings.md is made from it.
"""

from __future__ import annotations

import sys
from typing import TypeVar

from pydantic import Field, PostgresDsn, RedisDsn, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.keeping import ERASE_WITHIN_S

PREFIX = "WAYBILL_"


class _FromEnvironment(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", hide_input_in_errors=True)


class Settings(_FromEnvironment):
    """What every process has."""

    host: str = Field("127.0.0.1", description="Address that the public port listens on.")
    private_host: str = Field("127.0.0.1", description="Address that the port of health and metrics listens on.")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="Least level that is logged.")


class PostgresSettings(_FromEnvironment):
    """How to reach Postgres."""

    postgres_url: PostgresDsn = Field(description="Address of Postgres with this service's own role in it.")
    postgres_pool: int = Field(8, ge=1, le=200, description="Most connections that this process opens.")


class KafkaSettings(_FromEnvironment):
    """How to reach Kafka."""

    kafka_bootstrap: str = Field(min_length=3, description="Brokers, `host:port` with commas between.")
    topic_prefix: str = Field(
        "waybill", pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="What the topics' names begin with."
    )


class ErasureSettings(_FromEnvironment):
    """By when what was erased is gone."""

    erase_within_s: int = Field(
        ERASE_WITHIN_S,
        ge=120,
        description=(
            "After so many seconds what users delete is in no outbox partition and no topic any more, old versions of "
            "rows included. `waybill migrate` and `waybill up` set the topics, the relay sees to the rest."
        ),
    )


class RedisSettings(_FromEnvironment):
    """How to reach Redis or Valkey."""

    redis_url: RedisDsn = Field(description="Address of Redis. It holds only what may vanish.")


class LogSettings(_FromEnvironment):
    """Of the log of state changes."""

    transition_log: bool = Field(
        True,
        description=(
            "Whether pushes, sends and publications go to the log of state changes (`transition`). Off is for "
            "measuring what they cost: what happens meanwhile is not in the log."
        ),
    )


class AuthSettings(_FromEnvironment):
    """How tokens are verified."""

    auth_secret: SecretStr | None = Field(
        None, min_length=1, description="Secret of HS256 tokens, and of those that services give each other."
    )
    auth_jwks: str | None = Field(None, description="File or URL of a JWK set, for RS256, ES256 and EdDSA tokens.")
    auth_audience: str | None = Field(None, description="If set, a token's `aud` must hold it.")
    auth_issuer: str | None = Field(None, description="If set, a token's `iss` must be it.")

    @model_validator(mode="after")
    def _some_key(self) -> AuthSettings:
        if self.auth_secret is None and self.auth_jwks is None:
            raise ValueError("WAYBILL_AUTH_SECRET or WAYBILL_AUTH_JWKS must be set")
        return self


Some = TypeVar("Some", bound=BaseSettings)


def load(kind: type[Some]) -> Some:
    """Read the environment, or say which variables are wrong and end the process with code 2.

    The message names each variable and what is wrong with it, never its value: it may be a secret.
    """
    try:
        return kind()
    except ValidationError as error:
        for problem in error.errors(include_input=False, include_url=False):
            name = ".".join(str(part) for part in problem["loc"]).upper()
            print(f"{PREFIX + name + ': ' if name else ''}{problem['msg']}", file=sys.stderr)
        raise SystemExit(2) from None
