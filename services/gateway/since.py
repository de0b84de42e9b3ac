"""What `listed` says as `since`, and what a client shows of it in its next `hello` (protocol §3). Pure.

Opaque to clients. It names the store's incarnation and a transaction: all that earlier transactions had done was in the
snapshot that the client was told of.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_WIRE = re.compile(r"([0-9a-fA-F-]{1,64})\.([0-9]{1,20})")
_MOST = 2**64 - 1


class Since(NamedTuple):
    """``incarnation``: as `store_incarnation()` says. ``xmin``: all transactions below it are in the snapshot."""

    incarnation: str
    xmin: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.xmin}"

    @classmethod
    def parse(cls, text: str | None) -> Since | None:
        """What a client shows; None if it is nothing that `str` makes."""
        found = _WIRE.fullmatch(text) if text is not None else None
        if found is None or (xmin := int(found[2])) > _MOST:
            return None
        return cls(found[1].lower(), xmin)


def known_since(text: str | None, incarnation: str) -> int | None:
    """The transaction that a client's `since` names; None if it tells nothing of this store: then all is listed."""
    since = Since.parse(text)
    return since.xmin if since is not None and since.incarnation == incarnation.lower() else None
