"""How an ``edit``, ``recall`` or ``delete`` changes an event that a device holds. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._frames import Event

CHANGES = frozenset({"edit", "recall", "delete"})


def apply(held: Event, change: Event) -> Event:
    """Return ``held`` as it is after ``change``; unchanged if what is held already shows it or something newer."""
    newest = max(held.edited_by or 0, held.recalled_by or 0, held.deleted_by or 0)
    if change.seq <= newest:
        return held
    if change.type == "delete":
        return replace(held, body=None, deleted_by=change.seq)
    if change.type == "recall":
        return replace(held, body=None, recalled_by=change.seq)
    # An edit with a null body is one of something that was recalled, deleted, or is not to be seen.
    if change.body is None or held.recalled_by or held.deleted_by:
        return held
    return replace(held, body=change.body, edited_by=change.seq)


def hides(change: Event) -> bool:
    """Tell whether ``change`` takes the body away, from the target's earlier edits too."""
    return change.type in ("recall", "delete")
