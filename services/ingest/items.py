"""The body of `POST /v1/events` as items, each right or wrong by itself. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.contracts.decode import LOOK_BYTES, at_fault, decode, elements, is_json, members
from shared.contracts.sends import SendItem
from shared.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ITEMS = 500
"""Of one request."""

_MAX_CUT_BYTES = 1024 * 1024
"""A larger text that is not JSON is refused as a whole: cutting it up would hold the loop for too long."""


class _Request(msgspec.Struct, frozen=True):
    events: list[msgspec.Raw]


_REQUEST = msgspec.json.Decoder(_Request)
_ITEM = msgspec.json.Decoder(SendItem)


def items(text: bytes) -> list[bytes]:
    """The items' texts, not looked into yet. Raises `BadRequestError` for what no item can be blamed for.

    A text that is not JSON because of one item (NaN, half a surrogate, 10,000 levels) is cut up all the same, so that
    this item fails alone.
    """
    try:
        found: Sequence[bytes | msgspec.Raw] = decode(_REQUEST, text, fallback="events").events
    except BadRequestError as error:
        cut = _cut(text)
        if cut is None:
            raise
        if all(is_json(item) for item in cut):
            raise BadRequestError("not valid JSON", field="events") from error
        found = cut
    if len(found) > MAX_ITEMS:
        raise BadRequestError(f"at most {MAX_ITEMS} events at once", field="events")
    return [bytes(item) for item in found]


def item(text: bytes) -> SendItem:
    """An item. Raises `BadRequestError` with the field at fault."""
    try:
        return decode(_ITEM, text, fallback="")
    except BadRequestError as error:
        if not error.field:
            error.field = at_fault(members(text), cut=len(text) > LOOK_BYTES)
        raise


def _cut(text: bytes) -> list[bytes] | None:
    if len(text) > _MAX_CUT_BYTES or not text.strip().endswith(b"}"):
        return None
    events = members(text, most=_MAX_CUT_BYTES).get("events")
    return None if events is None else elements(events)
