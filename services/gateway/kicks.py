"""News from other gateways that may end a session here: a newer session of its device, a revoked token.

Both are hints. The truth is in Postgres; without Redis it is found later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.gateway.channel import Channel
from services.gateway.metrics import REDIS_BAD_MESSAGES
from shared import hints

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.gateway.link import Link

_GATHER_S = 0.05


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """A device has a session with this number now."""

    user_id: str
    device_id: str
    number: int


_DECODER = msgspec.json.Decoder(tuple[str, list[Opened]])


class Kicks:
    """``replaced(user_id, device_id, number)``: sessions of the device with a smaller number are out of date.

    ``revoked(hint)``: tokens were revoked. Neither may block. A gateway's own news do not come back to it.
    """

    def __init__(
        self,
        link: Link,
        *,
        prefix: str,
        replaced: Callable[[str, str, int], None],
        revoked: Callable[[hints.Revocation], None],
    ) -> None:
        self._replaced = replaced
        self._revoked = revoked
        self._sessions = Channel(link, prefix, "sessions", _DECODER, self._hear, gather_s=_GATHER_S)
        link.subscribe(hints.revocations_channel(prefix), self._hear_hint)

    def opened(self, user_id: str, device_id: str, number: int) -> None:
        """A session with this number was opened here: tell the others."""
        self._sessions.tell(Opened(user_id, device_id, number))

    async def run(self) -> None:
        """Publish until cancelled."""
        await self._sessions.run()

    def _hear(self, opened: Opened) -> None:
        self._replaced(opened.user_id, opened.device_id, opened.number)

    def _hear_hint(self, message: bytes) -> None:
        try:
            hint = hints.decode(message)
        except msgspec.MsgspecError:
            REDIS_BAD_MESSAGES.inc()
            return
        self._revoked(hint)
