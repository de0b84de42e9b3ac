"""`waybill bench send`: how many sends per second are written on one connection budget.

Three ways in, each the same for both sides:

- *batches over HTTP*, as the gateway makes them: the figures `waybill` and `peer`. Requests of ``batch`` sends,
  ``in_flight`` of them at a time, to a FastAPI door in a process of its own, with a token.
- *single sends over HTTP*: each send is a request. Here the cost of HTTP in Python decides, not the writer.
- *the writer alone*: no HTTP; every send is a call in this process, as many at a time as above.

Whatever a side does to deliver goes on meanwhile: Waybill's relay and gateway, the reference's dispatcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import asyncpg
import msgspec

from bench import stage
from bench.figures import Figures, Turn, medians, ratio
from bench.loads import closed_loop
from bench.messages import Messages, pairs
from bench.reference import door
from bench.reference.seed_outbox import Design, Message, Writing, opened, prepare
from deploy.local.ports import free_port
from deploy.migrate import url_of_role
from services.ingest.admission import admit
from services.ingest.items import item
from services.ingest.lanes import Lanes, Limits
from services.ingest.writer import Writer
from shared.auth import Claims, mint
from shared.errors import WaybillError
from shared.postgres import open_pool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bench.messages import Chat
    from bench.stage import Reference
    from deploy.local.endpoints import Endpoints

    Call = Callable[[], Awaitable[int]]

_UNSENT = """
SELECT count(*) FROM outbox AS o JOIN outbox_shard AS s USING (shard) WHERE o.id > s.cursor_id
"""
_TIMEOUT_S = 30.0
_START_S = 30.0
_WRITTEN = (200, 201)
_COUNTED = ("rate_s", "p50_ms", "p99_ms")


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds are per turn; ``rounds`` turns of each side take turns."""

    pool: int = 8
    chats: int = 200
    batch: int = 250
    in_flight: int = 8
    warm_s: float = 2.0
    measure_s: float = 8.0
    rounds: int = 3

    @property
    def sends_in_flight(self) -> int:
        """Sends that wait for their answer at any time."""
        return self.batch * self.in_flight


@dataclass(slots=True)
class _Side:
    """A side's turns by one way in."""

    turns: list[Figures] = field(default_factory=list)

    def figures(self) -> Figures:
        return medians(self.turns)


class _Bench:
    def __init__(self, of: Endpoints, reference: Reference, chats: list[Chat], settings: Settings) -> None:
        self._of = of
        self._reference = reference
        self._chats = chats
        self._settings = settings
        self._messages = Messages(chats)

    # Over HTTP.

    async def waybill_http(self, batch: int, in_flight: int) -> Figures:
        token = mint(self._of.auth_secret, "gateway", scope="gateway")
        return await self._http(self._of.ingest, token, batch, in_flight, self._waybill_unsent)

    async def reference_http(self, batch: int, in_flight: int, *, writing: Writing, push: bool) -> Figures:
        await prepare(self._reference.postgres, [chat.conversation_id for chat in self._chats])
        async with self._door(writing, push=push) as base:
            token = mint(self._of.auth_secret, "gateway", scope="gateway")

            async def unsent() -> int:
                timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
                async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{base}/unsent") as answer:
                    return int(await answer.text())

            return await self._http(base, token, batch, in_flight, unsent)

    async def _http(
        self, base: str, token: str, batch: int, in_flight: int, unsent: Callable[[], Awaitable[int]]
    ) -> Figures:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=in_flight)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:

            async def call() -> int:
                body = msgspec.json.encode({"events": [self._messages.next() for _ in range(batch)]})
                async with http.post(f"{base}/v1/events", data=body) as answer:
                    text = await answer.read()
                if answer.status not in _WRITTEN:
                    raise RuntimeError(f"{base} answered {answer.status}: {text[:500]!r}")
                return _written(text, batch)

            return await self._measure(call, in_flight, unsent)

    @contextlib.asynccontextmanager
    async def _door(self, writing: Writing, *, push: bool) -> AsyncIterator[str]:
        port = free_port()
        options = {
            "postgres": self._reference.postgres,
            "kafka": self._reference.kafka,
            "topic": self._reference.topic,
            "port": str(port),
            "pool": str(self._settings.pool),
            "writing": writing,
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", door.__name__, *arguments, *(["--push"] if push else [])),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "WAYBILL_AUTH_SECRET": self._of.auth_secret},
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
            if line.strip() != b"ready":
                raise RuntimeError("the reference did not start")
            yield f"http://{door.HOST}:{port}"
        finally:
            await _end(process)

    # In this process.

    async def waybill_writer(self) -> Figures:
        claims = Claims("gateway", "gateway", None, float("inf"))
        url = url_of_role(self._of.postgres, "ingest")
        limits = Limits()
        # Ingest gives its lanes a connection each out of the budget; the rest is for its readers.
        async with open_pool(url, size=min(limits.lanes, self._settings.pool), name="waybill bench") as pool:
            lanes = Lanes(Writer(pool, limits.send_timeout_s).write, limits)

            async def call() -> int:
                text = msgspec.json.encode(self._messages.next())
                (answer,) = await lanes.send([admit(claims, item(text), digest_key=b"a key of the benchmark")])
                if isinstance(answer, WaybillError):
                    raise answer
                return 1

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(lanes.run())
                try:
                    return await self._measure(call, self._settings.sends_in_flight, self._waybill_unsent)
                finally:
                    lanes.stop()

    async def reference_writer(self, writing: Writing) -> Figures:
        await prepare(self._reference.postgres, [chat.conversation_id for chat in self._chats])
        decode = msgspec.json.Decoder(Message).decode
        place = self._reference
        design = Design(pool=self._settings.pool, writing=writing)
        async with opened(place.postgres, place.kafka, place.topic, design) as outbox:

            async def call() -> int:
                await outbox.send(decode(msgspec.json.encode(self._messages.next())))
                return 1

            return await self._measure(call, self._settings.sends_in_flight, outbox.unsent)

    # Both.

    async def _measure(self, call: Call, callers: int, unsent: Callable[[], Awaitable[int]]) -> Figures:
        left = 0

        async def end() -> None:
            nonlocal left
            left = await unsent()

        turn: Turn = await closed_loop(
            call, callers=callers, warm_s=self._settings.warm_s, measure_s=self._settings.measure_s, end=end
        )
        return {**turn.figures(), "unsent_at_end": left}

    async def _waybill_unsent(self) -> int:
        connection = await asyncpg.connect(self._of.postgres, timeout=_TIMEOUT_S)
        try:
            return int(await connection.fetchval(_UNSENT, timeout=_TIMEOUT_S))
        finally:
            await connection.close(timeout=_TIMEOUT_S)

    async def settle(self) -> None:
        """Wait until Waybill has delivered all, so that no turn pays for an earlier one."""
        async with asyncio.timeout(120):
            while await self._waybill_unsent():  # noqa: ASYNC110 - rows in a table set no event
                await asyncio.sleep(0.1)


async def measure(of: Endpoints, settings: Settings) -> dict[str, object]:
    """Both sides in turn, and the medians of the turns: the result but for machine, date and command.

    Raises `RuntimeError` if a side refuses a send.
    """
    async with stage.reference(of) as reference:
        chats = await stage.make_chats(of, pairs(60, settings.chats, f"bench-{os.getpid()}"))
        bench = _Bench(of, reference, chats, settings)
        batch, in_flight, single = settings.batch, settings.in_flight, settings.in_flight * 4
        ways: dict[str, Callable[[], Awaitable[Figures]]] = {
            "waybill": lambda: bench.waybill_http(batch, in_flight),
            "peer": lambda: bench.reference_http(batch, in_flight, writing="statements", push=False),
            "peer_after_commit": lambda: bench.reference_http(batch, in_flight, writing="statements", push=True),
            "peer_at_once": lambda: bench.reference_http(batch, in_flight, writing="at_once", push=False),
            "waybill_writer": bench.waybill_writer,
            "peer_writer": lambda: bench.reference_writer("statements"),
            "peer_writer_at_once": lambda: bench.reference_writer("at_once"),
            "waybill_single": lambda: bench.waybill_http(1, single),
            "peer_single": lambda: bench.reference_http(1, single, writing="statements", push=False),
        }
        sides = {name: _Side() for name in ways}
        for number in range(settings.rounds):
            for name, way in ways.items():
                await bench.settle()
                sides[name].turns.append(await way())
                stage.say(f"round {number + 1} of {settings.rounds}, {name}: {sides[name].turns[-1]}")
    found = {name: side.figures() for name, side in sides.items()}
    return {
        "name": "send",
        "waybill": found["waybill"],
        "peer": found["peer"],
        "ratio": _ratio(found["waybill"], found["peer"]),
        "peer_after_commit": found["peer_after_commit"],
        "peer_at_once": found["peer_at_once"],
        "ratio_at_once": _ratio(found["waybill"], found["peer_at_once"]),
        "writer_only": {
            "waybill": found["waybill_writer"],
            "peer": found["peer_writer"],
            "ratio": _ratio(found["waybill_writer"], found["peer_writer"]),
            "peer_at_once": found["peer_writer_at_once"],
            "ratio_at_once": _ratio(found["waybill_writer"], found["peer_writer_at_once"]),
        },
        "single_requests": {
            "waybill": found["waybill_single"],
            "peer": found["peer_single"],
            "ratio": _ratio(found["waybill_single"], found["peer_single"]),
        },
        "settings": asdict(settings),
        "turns": {name: side.turns for name, side in sides.items()},
    }


def _ratio(waybill: Figures, peer: Figures) -> Figures:
    return ratio({name: waybill[name] for name in _COUNTED}, peer)


class _Result(msgspec.Struct):
    status: int


class _Results(msgspec.Struct):
    results: list[_Result]


_RESULTS = msgspec.json.Decoder(_Results)


def _written(text: bytes, count: int) -> int:
    results = _RESULTS.decode(text).results
    if len(results) != count or any(result.status not in _WRITTEN for result in results):
        raise RuntimeError(f"not all were written: {text[:500]!r}")
    return count


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
