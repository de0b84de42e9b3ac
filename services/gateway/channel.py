"""A lossy channel between all gateways: items are gathered and go out through Redis as one message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from services.gateway.link import AwayError
from services.gateway.metrics import REDIS_BAD_MESSAGES, REDIS_DROPPED

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.gateway.link import Link

Item = TypeVar("Item", bound=msgspec.Struct)


class Channel(Generic[Item]):
    """``heard`` gets each item that another gateway told; it must not block.

    A message is the JSON of `[origin, [item, …]]`, which ``decoder`` reads. ``name`` is also the metric's label. Items
    are dropped while Redis is away, and where more than ``most`` wait.
    """

    def __init__(
        self,
        link: Link,
        prefix: str,
        name: str,
        decoder: msgspec.json.Decoder[tuple[str, list[Item]]],
        heard: Callable[[Item], None],
        *,
        gather_s: float,
        most: int = 5_000,
    ) -> None:
        self._link = link
        self._name = f"{prefix}:{name}"
        self._dropped = REDIS_DROPPED.labels(name)
        self._decoder = decoder
        self._heard = heard
        self._gather_s = gather_s
        self._most = most
        self._items: list[Item] = []
        self._some = asyncio.Event()
        link.subscribe(self._name, self._message)

    def tell(self, item: Item) -> None:
        """Tell the other gateways soon, or never."""
        if not self._link.available or len(self._items) >= self._most:
            self._dropped.inc()
            return
        self._items.append(item)
        self._some.set()

    async def run(self) -> None:
        """Publish what was told, until cancelled."""
        while True:
            await self._some.wait()
            await asyncio.sleep(self._gather_s)
            self._some.clear()
            items, self._items = self._items, []
            try:
                await self._link.publish(self._name, msgspec.json.encode((self._link.origin, items)))
            except AwayError:
                self._dropped.inc(len(items))

    def _message(self, message: bytes) -> None:
        try:
            origin, items = self._decoder.decode(message)
        except msgspec.MsgspecError:
            REDIS_BAD_MESSAGES.inc()
            return
        if origin != self._link.origin:
            for item in items:
                self._heard(item)
