"""Who has an event: how many hold it and have read it, and their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from ._frames import MessageReceipts, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ._frames import Receipt
    from .engine import Engine


class Readers:
    """What is asked about an event's receipts: a part of ``Client``."""

    _engine: Engine
    _send_timeout_s: float | None

    async def receipts_of(
        self,
        conversation_id: str,
        seq: int,
        state: Literal["read", "delivered", "unread"] = "read",
        after: str | None = None,
        limit: int = 100,
        *,
        timeout_s: float | None = None,
    ) -> MessageReceipts:
        """Return who has the event ``seq``: counts of all who may see it, but for its sender, and a page of names.

        ``state``: whose names; ``unread`` are all who have not read it. ``after``: the last page's ``next``. At most
        500 to a page. Errors as with ``create``, ``NotFound`` with ``field`` ``seq`` for an event that the user may not
        see, and ``Unsupported`` from a server of before this could be asked.
        """
        fields: dict[str, Any] = {"conversation_id": conversation_id.lower(), "seq": seq, "state": state}
        if after is not None:
            fields["after"] = after
        found: MessageReceipts = await self._engine.ask(
            ("receipts", conversation_id.lower(), str(uuid4())),
            encode({**fields, "limit": limit})[1:],
            timeout_s if timeout_s is not None else self._send_timeout_s,
            keep=False,
        )
        return found

    async def all_receipts_of(
        self,
        conversation_id: str,
        seq: int,
        state: Literal["read", "delivered", "unread"] = "read",
        *,
        page: int = 500,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Receipt]:
        """Iterate over the receipts of all users of the state, in order of user id, ``page`` to a request.

        Each page is as it was when it was asked for; who changes meanwhile may be left out. ``timeout_s``: of each
        page. Errors as with ``receipts_of``.
        """
        after: str | None = None
        while True:
            found = await self.receipts_of(conversation_id, seq, state, after, page, timeout_s=timeout_s)
            for receipt in found.users:
                yield receipt
            if found.next is None:
                return
            after = found.next
