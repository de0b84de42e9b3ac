"""A gateway's core without sockets, Kafka, Redis and a clock of its own: real sessions over a store in memory."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast

from services.gateway import clock, connection, hello, loading, requests, resending, ticking
from services.gateway.catchup import CatchUp
from services.gateway.connection import Connection
from services.gateway.events import EVENT_TYPE
from services.gateway.fanout import Fanout
from services.gateway.group_receipts import SoFar
from services.gateway.hello import Greeter
from services.gateway.loading import Loader
from services.gateway.opening import Opened
from services.gateway.parts import Parts
from services.gateway.pushed import Pushes
from services.gateway.settings import GatewaySettings
from shared.auth import Claims
from shared.errors import UnauthenticatedError
from tests.followers import visit, written
from tests.timelines import Store
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import pytest

NEVER = float("inf")
SOON = 20.0
"""How long a test waits for what is sure to come."""


class Time:
    """Takes the place of the module `time`: passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.wall = 1_800_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall


class Wire:
    """A client's end, and what the session wrote to it."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.writes = 0
        self.closed: tuple[int, str] | None = None
        self.congested = False
        self.waiting_bytes = 0
        self.authorization: list[str] = []
        self.pings = 0
        self.unanswered = 0
        self.answers = True
        self.most = 0
        self.paused = False
        self.handler: Connection = cast("Connection", None)
        self._inbox: deque[str | bytes] = deque()

    def write(self, frames: bytes) -> None:
        if self.closed is None:
            self.writes += 1
            self.frames += written(frames)

    def close(self, code: int, reason: str = "") -> None:
        if self.closed is None:
            self.closed = code, reason

    def ping(self) -> None:
        self.pings += 1
        self.unanswered += not self.answers

    def limit(self, most: int) -> None:
        self.most = most

    def forget_headers(self) -> None:
        self.authorization = []

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            asyncio.get_running_loop().call_soon(self._deliver)

    def say(self, *frames: dict[str, Any] | bytes) -> None:
        """What the client sends, at once."""
        self._inbox += [one if isinstance(one, bytes) else json.dumps(one) for one in frames]
        self._deliver()

    def _deliver(self) -> None:
        while self._inbox and not self.paused and self.closed is None:
            self.handler.message(self._inbox.popleft())

    def drain(self) -> None:
        """The client has read what waited."""
        self.congested = False
        self.handler.writable()

    def of(self, type_: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame["t"] == type_]

    @property
    def types(self) -> list[str]:
        return [frame["t"] for frame in self.frames]

    def seqs(self, name: str | None = None) -> list[int]:
        return [frame["seq"] for frame in self.of("event") if name in (None, frame["conversation_id"])]


class Recorder:
    """Keeps the calls of the methods that a part has: (name, arguments)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            self.calls.append((name, (*arguments, *named.values())))

        return call

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]


class _Acks(Recorder):
    """``later``: what of ``hold`` may be gathered for long."""

    def __init__(self) -> None:
        super().__init__()
        self.later: list[tuple[Any, ...]] = []

    def hold(self, device: Any, ranges: Any, *, later: bool = False) -> None:
        self.calls.append(("hold", (device, ranges)))
        if later:
            self.later.append((device, ranges))


class _Transitions(Recorder):
    """``pushes``: as the gateway's own keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.pushes = Pushes()


class _Opener:
    def __init__(self) -> None:
        self.number = 0

    async def open(self, *_: Any) -> Opened:
        self.number += 1
        return Opened(self.number, ())


class _Verifier:
    """A token is a user id, maybe with seconds to live and a device behind it: `ann:30:phone`."""

    def __init__(self, time: Time) -> None:
        self._time = time

    async def verify(self, token: str | None) -> Claims:
        if not token:
            raise UnauthenticatedError("a token is needed")
        user_id, ttl, device = (*token.split(":"), "", "")[:3]
        return Claims(user_id, "user", device or None, self._time.wall + float(ttl or 3600))


class House:
    """``forward`` lets time pass; ``live`` writes to the store and brings the record, as Kafka does on most days."""

    def __init__(self, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.time = Time()
        for module in (connection, requests, resending, ticking):
            patch.setattr(module, "time", self.time)
        for module in (hello, loading):
            patch.setattr(module, "_GATHER_S", 0.0)
        defaults = {
            name: one.get_default(call_default_factory=True)
            for name, one in GatewaySettings.model_fields.items()
            if not one.is_required()
        }
        self.settings = cast("GatewaySettings", SimpleNamespace(**{**defaults, **settings}))
        self.store = Store()
        self.pool = cast("Any", self.store)
        self.tasks: set[asyncio.Task[None]] = set()
        self.heap = clock.Heap()
        self.fanout = Fanout(clock=self.time.monotonic)
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.fanout.watching.later = self._later
        self.catch_up = CatchUp(self.pool, self.fanout, at_once=2, page=4)
        self.loader = Loader(self.pool)
        self.opener = _Opener()
        self.greeter = Greeter(self.pool, self.fanout, cast("Any", self.opener), at_once=2, spawn=self.spawn)
        self.acks = _Acks()
        self.sends, self.social, self.transitions = Recorder(), Recorder(), _Transitions()
        self.sessions: set[Connection] = set()
        asking = asyncio.Semaphore(2)
        self.parts = Parts(
            settings=self.settings,
            pool=self.pool,
            verifier=cast("Any", _Verifier(self.time)),
            fanout=self.fanout,
            catch_up=self.catch_up,
            asking=asking,
            acks=cast("Any", self.acks),
            sends=cast("Any", self.sends),
            clock=cast("Any", self.heap),
            greeter=self.greeter,
            loader=self.loader,
            social=cast("Any", self.social),
            transitions=cast("Any", self.transitions),
            so_far=SoFar(self.pool, asking, self.spawn),
            spawn=self.spawn,
            sessions=self.sessions,
        )

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        self._loops = [self.spawn(self.catch_up.run()), self.spawn(self.loader.run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def wire(self) -> Wire:
        """Somebody connects."""
        wire = Wire()
        wire.handler = Connection(cast("Any", wire), self.parts)
        return wire

    async def open(self, user_id: str = "ann", device_id: str = "phone", *, ttl: float = 3600.0, **said: Any) -> Wire:
        """A session that is listed, and live if it has no more to read than its window has room for."""
        wire = self.wire()
        wire.say({"t": "hello", "token": f"{user_id}:{ttl}", "device_id": device_id, **said})
        await self.quiet()
        assert "listed" in wire.types, wire.closed or wire.types
        return wire

    async def until(self, condition: Any, what: str) -> None:
        await until(condition, timeout=SOON, what=what)

    async def quiet(self) -> None:
        """Until nothing is left to do but for time to pass."""
        for _ in range(10_000):
            visit(self.fanout)
            await asyncio.sleep(0)
            if not self.busy:
                return
        raise AssertionError("it never comes to rest")

    @property
    def busy(self) -> bool:
        return bool(
            len(self.catch_up._turns)
            or self.loader._wanted
            or self.loader._some.is_set()
            or len(self.tasks) > 2
            or self.fanout.out.queue
        )

    def come(self, name: str, *seqs: int) -> None:
        """Records come from Kafka; no feed was visited yet."""
        for seq in seqs:
            of = self.store.of[name]
            type_ = EVENT_TYPE + of.events[seq - 1][0]
            if self.fanout.wants(name, type_):
                self.fanout.event(name, seq, type_, of.value(seq))

    def say(self, name: str, *seqs: int) -> None:
        """And go to whom they can."""
        self.come(name, *seqs)
        visit(self.fanout)

    def live(self, name: str, count: int = 1) -> None:
        for _ in range(count):
            self.say(name, self.store.of[name].write())

    def forward(self, seconds: float) -> None:
        """Time passes; each session is looked at when it is due, and rounds of watchers are held when they are."""
        end = self.time.now + seconds
        while (due := min(self.heap.next, self._calls[0][0] if self._calls else NEVER)) <= end:
            self._at(max(self.time.now, due))
            while self._calls and self._calls[0][0] <= self.time.now:
                heapq.heappop(self._calls)[2]()
            while (timed := self.heap.due(self.time.now)) is not None:
                self.heap.at(timed, timed.tick(self.time.now))
        self._at(end)

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._calls, (self.time.now + seconds, self._number, then))

    def _at(self, now: float) -> None:
        self.time.wall += now - self.time.now
        self.time.now = now
