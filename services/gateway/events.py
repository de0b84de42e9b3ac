"""An event as the gateway handles it: ready to be written, with the little that has to be known of its content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from services.gateway.wire import ready

EVENT_TYPE = "waybill.event."
"""What the `ce_type` of an event begins with."""

MEMBER, CONVERSATION, EDIT = "member", "conversation", "edit"
_EVENT_ID = b'"event_id":"'
_CHANGES_OTHERS = frozenset(("edit", "recall", "delete"))


class Change(NamedTuple):
    """What a `member` event does, and to whom. ``added``: whom a `member` or `conversation` event brings in."""

    action: str | None
    user_id: str | None
    role: str | None
    added: tuple[str, ...]


@dataclass(slots=True)
class Entry:
    """One event of a timeline. ``frame``: bytes for the socket, its WebSocket header included.

    ``target``: of an edit, the seq that it changes, else 0. ``outdates``: what was read below it may be out of date.
    ``change``: of a `member` or `conversation` event. ``stamped``, ``committed``: when it came to Kafka and when it
    was committed, in seconds since the epoch; 0 if not known.
    """

    seq: int
    frame: bytes
    target: int = 0
    outdates: bool = False
    titles: bool = False
    change: Change | None = None
    stamped: float = 0.0
    committed: float = 0.0

    @property
    def event_id(self) -> bytes:
        """Cut out of the frame, where nobody but the server writes before it."""
        at = self.frame.find(_EVENT_ID) + len(_EVENT_ID)
        return self.frame[at : at + 36]

    @property
    def concerns(self) -> str | None:
        """Whose membership or role it changes."""
        return None if self.change is None or self.titles else self.change.user_id


def entry(seq: int, type_: str, value: bytes, stamped: float = 0.0, committed: float = 0.0) -> Entry:
    """An event from its frame's JSON. ``type_``: the event's type, without the prefix of `ce_type`.

    Raises `msgspec.MsgspecError` if it has to be looked into and cannot be read.
    """
    made = Entry(seq, ready(value), stamped=stamped, committed=committed)
    if type_ in (MEMBER, CONVERSATION):
        made.titles = type_ == CONVERSATION
        made.change = _change(_CHANGING.decode(value))
    elif type_ in _CHANGES_OTHERS:
        made.outdates = True
        if type_ == EDIT:
            made.target = _TARGETING.decode(value).target_seq
    return made


class _Changing(msgspec.Struct, frozen=True):
    sender_id: str
    body: dict[str, msgspec.Raw]

    def text(self, name: str) -> str | None:
        """A string member of the body. A client may have put anything else into it: then None."""
        try:
            return _TEXT.decode(self.body.get(name, _NULL))
        except msgspec.MsgspecError:
            return None


class _Targeting(msgspec.Struct, frozen=True):
    target_seq: int


_NULL, _NONE = msgspec.Raw(b"null"), msgspec.Raw(b"[]")
_TEXT = msgspec.json.Decoder(str | None)
_NAMES = msgspec.json.Decoder(list[str])
_CHANGING = msgspec.json.Decoder(_Changing)
_TARGETING = msgspec.json.Decoder(_Targeting)


def _change(changing: _Changing) -> Change:
    action = changing.text("action")
    subject = changing.sender_id if action == "leave" else changing.text("user_id")
    added: tuple[str, ...] = ()
    if action == "create":
        added = (*_NAMES.decode(changing.body.get("members", _NONE)), changing.sender_id)
    elif action == "add" and subject is not None:
        added = (subject,)
    return Change(action, subject, changing.text("role"), added)
