"""The one tree of errors, and the one table of what each means on a socket and over HTTP (protocol §4).

``definite`` says what the sender may conclude: true means surely not done; false means that it may have been
committed, so the same ``client_msg_id`` has to be sent again.
"""

from __future__ import annotations

from typing import ClassVar


class WaybillError(Exception):
    """An error that a client may be told: a code, a sentence, and where it applies a field and a delay."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    definite: ClassVar[bool] = False
    close_code: ClassVar[int] = 4500

    def __init__(self, message: str, *, field: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms

    def as_dict(self) -> dict[str, str | int]:
        """`{code, message, field?, retry_after_ms?}`: an item's error, and the shared part of frame and problem."""
        out: dict[str, str | int] = {"code": self.code, "message": self.message}
        if self.field is not None:
            out["field"] = self.field
        if self.retry_after_ms is not None:
            out["retry_after_ms"] = self.retry_after_ms
        return out


class BadRequestError(WaybillError):
    """A shape that the protocol does not allow; ``field`` names the place."""

    code, status, definite, close_code = "bad_request", 400, True, 4400


class UnauthenticatedError(WaybillError):
    """No token, or one that is not accepted."""

    code, status, definite, close_code = "unauthenticated", 401, True, 4401


class ForbiddenError(WaybillError):
    """Known, but without the right."""

    code, status, definite, close_code = "forbidden", 403, True, 4403


class NotMemberError(WaybillError):
    """Not a member any more, or a sender whom a service named is none."""

    code, status, definite, close_code = "not_member", 403, True, 4403


class NotFoundError(WaybillError):
    """Not there, or not there for this user: a stranger cannot tell which."""

    code, status, definite, close_code = "not_found", 404, True, 4403


class ClientMsgIdReusedError(WaybillError):
    """The client id is known with another content."""

    code, status, definite, close_code = "client_msg_id_reused", 409, True, 4400


class ConflictError(WaybillError):
    """The state of the conversation does not allow it."""

    code, status, definite, close_code = "conflict", 409, True, 4400


class TooLargeError(WaybillError):
    """Over a size limit."""

    code, status, definite, close_code = "too_large", 413, True, 1009


class ModeratedError(WaybillError):
    """Refused by the moderation hook, with its reason."""

    code, status, definite, close_code = "moderated", 422, True, 4403


class RateLimitedError(WaybillError):
    """Over a rate; nothing was written."""

    code, status, definite, close_code = "rate_limited", 429, True, 4429


class InternalError(WaybillError):
    """A fault of ours; what it did is not known."""

    code, status, definite, close_code = "internal", 500, False, 4500


class UnavailableError(WaybillError):
    """Cannot be done now; not known to be committed."""

    code, status, definite, close_code = "unavailable", 503, False, 4503


class TimedOutError(WaybillError):
    """No answer in time; not known to be committed."""

    code, status, definite, close_code = "timeout", 504, False, 4408


ERRORS: dict[str, type[WaybillError]] = {
    kind.code: kind
    for kind in (
        BadRequestError,
        UnauthenticatedError,
        ForbiddenError,
        NotMemberError,
        NotFoundError,
        ClientMsgIdReusedError,
        ConflictError,
        TooLargeError,
        ModeratedError,
        RateLimitedError,
        InternalError,
        UnavailableError,
        TimedOutError,
    )
}


def from_code(code: str, message: str, *, field: str | None = None, retry_after_ms: int | None = None) -> WaybillError:
    """The error that another service named by its code; an unknown code is `internal`."""
    return ERRORS.get(code, InternalError)(message, field=field, retry_after_ms=retry_after_ms)
