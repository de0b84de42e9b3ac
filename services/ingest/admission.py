"""Who may send what, as far as it can be said without the store, and what the store's refusals are called. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.contracts.body import MAX_BYTES, digest
from shared.contracts.sends import Draft, SendItem, draft
from shared.errors import (
    BadRequestError,
    ClientMsgIdReusedError,
    ConflictError,
    ForbiddenError,
    ModeratedError,
    NotFoundError,
    NotMemberError,
    WaybillError,
)

if TYPE_CHECKING:
    from shared.auth import Claims


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """An event to be written. ``as_service``: by a service, in the name of ``draft.sender_id``.

    ``device_id``: of the sender, where a gateway says so.
    """

    draft: Draft
    as_service: bool
    digest: bytes
    device_id: str | None = None

    @property
    def size(self) -> int:
        """Bytes of its body, about."""
        return 0 if self.draft.body is None else len(self.draft.body.text)


def admit(
    claims: Claims, item: SendItem, *, digest_key: bytes, max_body: int = MAX_BYTES, traceparent: str | None = None
) -> Send:
    """An item as an event to write: its shape is right, and its sender is one that the token may speak for.

    ``traceparent`` is taken if the item has none. Raises `BadRequestError`, `TooLargeError` or `ForbiddenError`.
    """
    made = draft(item, item.sender_id or claims.subject, max_body=max_body)
    as_service = _speaks(claims, item.sender_id, type_=made.type)
    if made.traceparent is None and traceparent is not None:
        made = msgspec.structs.replace(made, traceparent=traceparent)
    return Send(
        draft=made,
        as_service=as_service,
        digest=digest(digest_key, made.type, made.target_seq, made.body),
        device_id=item.device_id if claims.scope == "gateway" else None,
    )


def _speaks(claims: Claims, named: str | None, *, type_: str) -> bool:
    """Whether the sender's words are a service's. Raises what forbids them."""
    if claims.scope == "admin":
        raise ForbiddenError("an admin token does not send")
    if claims.scope == "user":
        if named not in (None, claims.subject):
            raise ForbiddenError("a user sends as nobody else", field="sender_id")
        return False
    if named is None and not (claims.scope == "service" and type_ == "system"):
        raise BadRequestError("sender_id is needed", field="sender_id")
    return claims.scope == "service"


def creator(claims: Claims, named: str | None) -> str:
    """Who makes a conversation. Raises `ForbiddenError` or `BadRequestError`."""
    if claims.scope == "admin":
        raise ForbiddenError("an admin token makes no conversations")
    return _acts_as(claims, named, "creator_id")


def own(claims: Claims, named: str | None) -> str:
    """Whose own settings or unread events are meant. Raises `ForbiddenError` or `BadRequestError`."""
    if claims.scope == "admin":
        raise ForbiddenError("an admin token is of no user")
    return _acts_as(claims, named, "user_id")


def _acts_as(claims: Claims, named: str | None, field: str) -> str:
    """The token's user, or whom a service names in ``field``."""
    if claims.scope == "user":
        if named not in (None, claims.subject):
            raise ForbiddenError("a user acts as nobody else", field=field)
        return claims.subject
    if named is None:
        raise BadRequestError(f"{field} is needed", field=field)
    return named


def reader(claims: Claims) -> str | None:
    """Whose eyes a token reads with: a user's, or None for a service, which sees all. Raises `ForbiddenError`."""
    if claims.scope == "user":
        return claims.subject
    if claims.scope == "service":
        return None
    raise ForbiddenError(f"a token of scope {claims.scope} does not read here")


_REFUSALS: dict[str, tuple[type[WaybillError], str, str | None]] = {
    "client_msg_id_reused": (
        ClientMsgIdReusedError,
        "this client_msg_id was used for another content",
        "client_msg_id",
    ),
    "not_found": (NotFoundError, "no such conversation", "conversation_id"),
    "not_member": (NotMemberError, "the sender is not a member", "conversation_id"),
    "forbidden_system": (ForbiddenError, "only services write system events", "type"),
    "forbidden_admins_only": (ForbiddenError, "only admins may do this", None),
    "forbidden_not_yours": (ForbiddenError, "the event is another user's", "target_seq"),
    "forbidden_too_late": (ForbiddenError, "it is too late for that", "target_seq"),
    "conflict_direct": (ConflictError, "the members of a direct chat do not change", None),
    "conflict_already_member": (ConflictError, "is a member already", "body.user_id"),
    "conflict_group_full": (ConflictError, "the group has as many members as it may have", "body.user_id"),
    "conflict_no_member": (ConflictError, "is not a member", "body.user_id"),
    "conflict_last_admin": (ConflictError, "the last admin cannot leave the others without one", None),
    "not_found_target": (NotFoundError, "no such event", "target_seq"),
    "conflict_target_type": (ConflictError, "only messages and system events are changed", "target_seq"),
    "conflict_target_gone": (ConflictError, "the event is recalled or deleted", "target_seq"),
    "moderated": (ModeratedError, "refused by moderation", None),
}
"""What `append_events` (deploy/migrations/0013_pre_timeline.sql) calls its refusals, and what they are to a sender."""


def refusal(outcome: str) -> WaybillError:
    """The error for a refusal of `append_events`."""
    kind, message, field = _REFUSALS[outcome]
    return kind(message, field=field)
