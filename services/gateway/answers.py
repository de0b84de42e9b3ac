"""What ingest answers, as the gateway needs it."""

from __future__ import annotations

import msgspec

from shared.errors import InternalError, WaybillError, from_code


class Committed(msgspec.Struct, frozen=True):
    """A written event, as ingest tells it."""

    event_id: str
    seq: int
    created_at: str
    duplicate: bool


class _Error(msgspec.Struct, frozen=True):
    code: str
    message: str = ""
    field: str | None = None
    retry_after_ms: int | None = None

    def raised(self) -> WaybillError:
        return from_code(self.code, self.message, field=self.field, retry_after_ms=self.retry_after_ms)


class Problem(msgspec.Struct, frozen=True):
    """An answer that is refused as a whole (RFC 9457)."""

    code: str
    detail: str = ""
    field: str | None = None
    retry_after_ms: int | None = None

    def raised(self) -> WaybillError:
        """The error that it names."""
        return from_code(self.code, self.detail, field=self.field, retry_after_ms=self.retry_after_ms)


class Result(msgspec.Struct, frozen=True):
    """The answer to one event of a batch."""

    status: int
    event: Committed | None = None
    error: _Error | None = None

    def outcome(self) -> Outcome:
        """What became of it."""
        if self.event is not None:
            return self.event
        return self.error.raised() if self.error is not None else InternalError("an empty result")


class Results(msgspec.Struct, frozen=True):
    """The answers to a batch, in order."""

    results: list[Result]


class Created(msgspec.Struct, frozen=True):
    """A conversation, as ingest tells it."""

    conversation_id: str
    existing: bool


class OwnSettings(msgspec.Struct, frozen=True):
    """A user's own settings of a conversation, as ingest tells them."""

    conversation_id: str
    muted: bool
    muted_until: str | None
    archived: bool


RESULTS = msgspec.json.Decoder(Results)
CREATED = msgspec.json.Decoder(Created)
SETTINGS = msgspec.json.Decoder(OwnSettings)
PROBLEM = msgspec.json.Decoder(Problem)

Outcome = Committed | WaybillError
