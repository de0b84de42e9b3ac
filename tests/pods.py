"""What a gateway does through Redis, without the gateway: several of these are several pods."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.local import ports, valkey
from deploy.local.process import Child
from services.gateway.kicks import Kicks
from services.gateway.limits import Limits, Rate
from services.gateway.link import Link
from services.gateway.presence import Presence
from services.gateway.spread import Spread
from services.gateway.typing import Typing
from shared.errors import UnavailableError
from tests.told import Told

if TYPE_CHECKING:
    from shared.hints import Revocation

QUICK: dict[str, float] = {
    "refresh_s": 1.0, "grace_s": 0.4, "settle_s": 0.5, "unknown_after_s": 0.2, "recheck_s": 600.0,
}  # fmt: skip
SHARED_RATE = Rate(20.0, 100.0)


class Member:
    """A feed of somebody who is a member and follows the conversation."""

    member = True
    loading = False


class Pod:
    """Everybody shares a conversation with everybody but with strangers, whose names begin with `x`."""

    def __init__(self, url: str, prefix: str, name: str, **presence: float) -> None:
        self.link = Link(url, prefix=prefix, answer_s=1.0, beat_s=0.05, probe_s=0.2)
        self.presence = Presence(self.link, self._shares, prefix=prefix, gateway=name, **{**QUICK, **presence})
        self.replaced: list[tuple[str, str, int]] = []
        self.revoked: list[Revocation] = []
        self.kicks = Kicks(self.link, prefix=prefix, replaced=self._replaced, revoked=self.revoked.append)
        self.rooms: dict[str, dict[Told, Member]] = {}
        self.typing = Typing(self.link, lambda room: self.rooms.get(room, {}).items(), prefix=prefix)
        self.limits = Limits({}, {"sends": SHARED_RATE})
        self.spread = Spread(self.link, self.limits, prefix=prefix, every_s=0.02)
        self.postgres_away = False
        self.checks = 0

    async def _shares(self, pairs: Any) -> set[tuple[str, str]]:
        self.checks += 1
        if self.postgres_away:
            raise UnavailableError("away")
        return {(one, other) for one, other in pairs if not one.startswith("x") and not other.startswith("x")}

    def _replaced(self, user_id: str, device_id: str, number: int) -> None:
        self.replaced.append((user_id, device_id, number))

    def open(self, user_id: str, session_id: str) -> Told:
        """A session begins."""
        self.presence.opened(session_id, user_id)
        return Told(user_id, session_id)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Pod"]:
        parts = (self.link, self.presence, self.kicks, self.typing, self.spread)
        async with asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(part.run()) for part in parts]
            try:
                yield self
            finally:
                for loop in loops:
                    loop.cancel()


class OwnValkey:
    """A server of its own that a test may stop, freeze and start again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.port = ports.free_port()
        self._command = valkey.prepare(folder / "data", folder / "log", self.port)
        self._child = Child(self._command)
        self._child.wait_ready(threading.Event())

    @property
    def url(self) -> str:
        return valkey.url(self.port)

    def start(self) -> None:
        self._child = Child(self._command)
        self._child.wait_ready(threading.Event())

    def stop(self) -> None:
        self._child.stop()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It takes connections and answers nothing."""
        self._child._popen.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._child._popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._child.kill()
