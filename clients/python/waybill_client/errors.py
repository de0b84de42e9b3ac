"""Every exception of the SDK, in one tree.

::

    WaybillError
    ├── Refused                definite: the server did not do it
    │   ├── BadRequest  Unauthenticated  Forbidden  NotMember  NotFound
    │   ├── ClientMsgIdReused  Conflict  TooLarge  Moderated  Unsupported
    │   └── RateLimited        may be asked again after ``retry_after_ms``
    ├── Unconfirmed            not definite: it may have been done
    │   ├── Unavailable  TimedOut  Internal
    │   ├── Unanswered         no answer within the caller's own time
    │   └── UnknownError       a code that this version does not know
    ├── QueueFull              refused on this machine, nothing left it
    ├── BadFrame               the server sent what the protocol does not allow
    └── Closed                 the client has stopped for good
        ├── BadHello  NotAllowed  TokenRefused  Replaced
        └── Crashed            an error in the SDK or in the store
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class WaybillError(Exception):
    """Base of all. ``code`` is the wire's name of the error, the same on the socket and over HTTP.

    ``definite`` is True where what was asked for surely did not happen. Where it is False, ask again with
    the same ``client_msg_id``: the answer is then the first result. ``retry_after_ms`` is in milliseconds,
    ``field`` is the dotted path of the argument at fault; both are None where the server named none.
    """

    code: str = "error"
    definite: bool = True

    def __init__(self, message: str = "", *, field: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message or self.code)
        self.field = field
        self.retry_after_ms = retry_after_ms


class Refused(WaybillError):  # noqa: N818 -- read with its module: errors.Refused
    """The server said no: nothing was written."""


class BadRequest(Refused):
    """The frame was malformed; ``field`` names what."""

    code = "bad_request"


class Unauthenticated(Refused):
    """No valid token. A token provider raises it to stop the client for good."""

    code = "unauthenticated"


class Forbidden(Refused):
    """A member, but without the right to do this."""

    code = "forbidden"


class NotMember(Refused):
    """No longer a member of the conversation."""

    code = "not_member"


class NotFound(Refused):
    """No such conversation or target, or one that this user may not know of."""

    code = "not_found"


class ClientMsgIdReused(Refused):
    """The id was used before, for another type, target or body."""

    code = "client_msg_id_reused"


class Conflict(Refused):
    """It contradicts the present state."""

    code = "conflict"


class TooLarge(Refused):
    """Larger than the server takes; found before it leaves where the limit is known."""

    code = "too_large"


class Moderated(Refused):
    """The operator's moderation said no."""

    code = "moderated"


class Unsupported(Refused):
    """The server does not know this kind of request: it is older than this SDK."""

    code = "unsupported"


class RateLimited(Refused):
    """Too fast. The SDK waits and asks again by itself."""

    code = "rate_limited"


class Unconfirmed(WaybillError):  # noqa: N818 -- read with its module: errors.Unconfirmed
    """It may have happened or not."""

    definite = False


class Unavailable(Unconfirmed):
    """A part of the server is away. The SDK asks again by itself."""

    code = "unavailable"


class TimedOut(Unconfirmed):
    """The server's own time ran out. The SDK asks again by itself."""

    code = "timeout"


class Internal(Unconfirmed):
    """A fault in the server, raised after several attempts."""

    code = "internal"


class Unanswered(Unconfirmed):
    """No answer came in the time that the caller gave. A send stays queued and still leaves later."""

    code = "unanswered"


class UnknownError(Unconfirmed):
    """An error code of a newer server, kept in ``code``."""


class QueueFull(WaybillError):  # noqa: N818 -- read with its module: errors.QueueFull
    """Too many requests wait for an answer already; this one was not queued."""

    code = "queue_full"


class BadFrame(WaybillError):  # noqa: N818 -- read with its module: errors.BadFrame
    """A frame from the server lacks a field or holds a wrong type."""

    code = "bad_frame"


class Closed(WaybillError):  # noqa: N818 -- read with its module: errors.Closed
    """The client has stopped and does not come back; ``close_code`` is the WebSocket's, if it had one.

    ``definite`` is False: what was in flight may have been done.
    """

    code = "closed"
    definite = False
    close_code: ClassVar[int | None] = None


class BadHello(Closed):
    """Close code 4400: this SDK and the server do not understand each other."""

    code = "bad_hello"
    close_code = 4400


class TokenRefused(Closed):
    """Close code 4401, and no provider that could give another token."""

    code = "token_refused"
    close_code = 4401


class NotAllowed(Closed):
    """Close code 4403: this token may not use the socket, or not as this device."""

    code = "not_allowed"
    close_code = 4403


class Replaced(Closed):
    """Close code 4409: a newer session of the same device took over."""

    code = "replaced"
    close_code = 4409


class Crashed(Closed):
    """The SDK or the store failed; ``__cause__`` holds what happened."""

    code = "crashed"


_BY_CODE: dict[str, type[WaybillError]] = {
    kind.code: kind
    for kind in (
        BadRequest,
        Unauthenticated,
        Forbidden,
        NotMember,
        NotFound,
        ClientMsgIdReused,
        Conflict,
        TooLarge,
        Moderated,
        RateLimited,
        Unavailable,
        TimedOut,
        Internal,
    )
}


def from_frame(frame: Mapping[str, Any]) -> WaybillError:
    """Return the exception that an ``error`` frame stands for (not raised)."""
    code = str(frame.get("code", "error"))
    retry = frame.get("retry_after_ms")
    field = frame.get("field")
    error = _BY_CODE.get(code, UnknownError)(
        str(frame.get("message", code)),
        field=field if isinstance(field, str) else None,
        retry_after_ms=int(retry) if isinstance(retry, int | float) else None,
    )
    error.code = code
    return error
