"""A user's own settings of a conversation, as they are asked for on the socket and over HTTP (protocol §3, §6)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta

from shared.errors import BadRequestError

MOMENT = r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})\Z"

Moment = Annotated[str, Meta(pattern=MOMENT)]
"""A time of a client's: RFC 3339 in any zone. The server writes it in UTC."""


def moment(text: str) -> datetime:
    """The time, in UTC. Raises `ValueError` for one that no calendar has."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except OverflowError:
        raise ValueError("beyond what a calendar has") from None


def check(*, muted: bool | None, muted_until: str | None, archived: bool | None) -> datetime | None:
    """See that something is to be set, and that a time goes with `muted`; returns the time in UTC.

    None of a value: it stays as it is; of ``muted_until`` beside ``muted``: for ever. Raises `BadRequestError`.
    """
    if muted is None and archived is None:
        raise BadRequestError("nothing to set: expected muted or archived", field="muted")
    if muted_until is None:
        return None
    if not muted:
        raise BadRequestError("goes with muted: true only", field="muted_until")
    try:
        return moment(muted_until)
    except ValueError:
        raise BadRequestError("no such time", field="muted_until") from None
