"""What Postgres holds of the demo's chats, read with the owner's address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.console.demo.verdict import Truth
from shared.postgres import from_multirange, open_pool
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

_SQL = statements(__file__)
_EVENTS = _SQL["events"]
_MEMBERS = _SQL["members"]
_BEHIND = _SQL["behind"]


async def read(owner_url: str, conversation_ids: Sequence[str]) -> Truth:
    """The committed events of these conversations and who may see them."""
    async with open_pool(owner_url, size=1, name="waybill-demo", timeout_s=30.0) as pool:
        events: dict[str, dict[int, str]] = {}
        for row in await pool.fetch(_EVENTS, conversation_ids):
            events.setdefault(row["conversation_id"], {})[row["seq"]] = row["event_id"]
        members = await pool.fetch(_MEMBERS, conversation_ids)
        visible = {(row["conversation_id"], row["user_id"]): from_multirange(row["visible"]) for row in members}
    return Truth(events, visible)


async def behind(owner_url: str, conversation_ids: Sequence[str]) -> int:
    """How many members' delivered tick is not yet at the end of what they may see."""
    async with open_pool(owner_url, size=1, name="waybill-demo") as pool:
        return int(await pool.fetchval(_BEHIND, conversation_ids))
