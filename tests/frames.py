"""Every frame that a test sees, held against the AsyncAPI document."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from waybill_client.connection import Connection, OnFrame

from deploy import asyncapi
from shared.contracts import frames
from shared.contracts.records import ReceiptRecord
from shared.errors import BadRequestError
from tests.schemas import Check, MismatchError, compiled

Direction = Literal["in", "out"]
"""`in`: from the server. `out`: to it."""

_OF_THE_RECORD = ReceiptRecord.model_fields.keys()
"""A receipt reaches clients as the bytes of its record, so it may have these, too."""


@cache
def _checks() -> dict[Direction, dict[str, tuple[Check, frozenset[str]]]]:
    document = asyncapi.document()
    schemas, messages = document["components"]["schemas"], document["components"]["messages"]
    made: dict[Direction, dict[str, tuple[Check, frozenset[str]]]] = {}
    for direction, models in (("out", asyncapi.from_client()), ("in", asyncapi.to_client())):
        made[direction] = {
            messages[model.__name__]["name"]: (
                compiled(messages[model.__name__]["payload"], schemas),
                frozenset(schemas[model.__name__]["properties"]),
            )
            for model in models
        }
    made["in"]["receipt"] = (made["in"]["receipt"][0], made["in"]["receipt"][1] | _OF_THE_RECORD)
    return made


def check_frame(direction: Direction, frame: Any) -> None:
    """See that a frame is one of the document's. Raises `MismatchError`, with the path to the fault.

    From the server no field may come that the document does not know; a client may say more than it has to.
    """
    if not isinstance(frame, dict):
        raise MismatchError(f"no object: {frame!r:.200}")
    type_ = frame.get("t")
    known = _checks()[direction].get(type_) if isinstance(type_, str) else None
    if known is None:
        raise MismatchError(f"no frame of this direction: {type_!r:.200}", "t")
    check, fields = known
    check(frame)
    if direction == "out":
        return
    if not frame.keys() <= fields:
        raise MismatchError(f"the document does not know it in {type_}", min(frame.keys() - fields))
    if type_ == "page":
        fields = _checks()["in"]["event"][1]
        for event in frame["events"]:
            if not event.keys() <= fields:
                raise MismatchError("the document does not know it in an event", min(event.keys() - fields), "events")


def check_sent(text: str) -> None:
    """See that what the codec takes from a client is in the document; what it does not take is not looked at."""
    try:
        frames.parse(text)
    except BadRequestError:
        return
    check_frame("out", json.loads(text))


@contextmanager
def sdk_watched() -> Iterator[list[str]]:
    """Hold every frame of every SDK client in this process to the document; what is not of it is in the list."""
    faults: list[str] = []
    made = Connection.__init__

    def watched(self: Connection, *arguments: Any, on_frame: OnFrame | None, **options: Any) -> None:
        def seen(direction: str, text: str, at: float) -> None:
            try:
                check_frame("in" if direction == "in" else "out", json.loads(text))
            except (MismatchError, ValueError) as fault:
                faults.append(f"{direction}: {fault}: {text:.500}")
            if on_frame is not None:
                on_frame(direction, text, at)

        made(self, *arguments, on_frame=seen, **options)

    Connection.__init__ = watched  # type: ignore[method-assign]
    try:
        yield faults
    finally:
        Connection.__init__ = made  # type: ignore[method-assign]
