"""`waybill bench e2e`: how long a message is on its way at a moderate, even rate.

- Waybill: `send` written at one member's socket → `event` read at the other member's, through gateway, ingest,
  Postgres, relay, Kafka and the gateway again. Also told: → `sent` at the sender's socket.
- The reference, in its best case: from the moment its transaction is committed until a Kafka consumer in the same
  process has the record. No socket, no HTTP, no gateway on either end.

Both in an open loop: messages begin at an even rate whether earlier ones have arrived or not.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import msgspec

from bench import stage
from bench.figures import Figures, Turn, medians, percentile, ratio
from bench.loads import open_loop
from bench.messages import Messages, pairs
from bench.reference.seed_outbox import Design, SeedOutbox, opened, prepare
from bench.sockets import Frame, open_sockets
from shared.auth import mint
from shared.kafka import partitions, reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bench.messages import Chat
    from bench.sockets import Socket
    from bench.stage import Reference
    from deploy.local.endpoints import Endpoints

_ARRIVE_S = 30.0
_TOKEN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds are per turn; ``rounds`` turns of each side take turns. ``pool``: connections of the reference."""

    pool: int = 8
    users: int = 20
    chats: int = 50
    rate_s: float = 50.0
    warm_s: float = 3.0
    measure_s: float = 12.0
    rounds: int = 3


@dataclass(slots=True)
class Flights:
    """Times of one turn's messages, by client id, in seconds of one clock. Only those in `begun` count."""

    begun: dict[str, float] = field(default_factory=dict)
    answered: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    seqs: dict[tuple[str, str], int] = field(default_factory=dict)
    """The highest seq that arrived, by place (a socket, a consumer) and conversation."""
    repeated: int = 0
    """Arrivals of a message that was there already."""
    disordered: int = 0
    """First arrivals below a seq of their conversation that had arrived at that place already."""
    all_in: asyncio.Event = field(default_factory=asyncio.Event)
    expected: set[str] = field(default_factory=set)

    def arrive(self, place: tuple[str, str], client_msg_id: str, seq: int, at: float) -> None:
        """A message is where it was to go."""
        if client_msg_id in self.arrived:
            self.repeated += 1
        elif seq < self.seqs.get(place, 0):
            self.disordered += 1
        else:
            self.seqs[place] = seq
        self.arrived.setdefault(client_msg_id, at)
        self.expected.discard(client_msg_id)
        if not self.expected:
            self.all_in.set()

    async def wait(self) -> None:
        """Wait until all that was sent has arrived. Raises `RuntimeError` if it does not."""
        self.all_in.clear()
        if self.expected:
            try:
                async with asyncio.timeout(_ARRIVE_S):
                    await self.all_in.wait()
            except TimeoutError:
                raise RuntimeError(f"{len(self.expected)} messages did not arrive") from None

    def figures(self, start: dict[str, float]) -> Figures:
        """From ``start`` (by client id) to the arrival."""
        return Turn([max(0.0, self.arrived[key] - start[key]) for key in self.begun]).figures()


class _Waybill:
    def __init__(self, sockets: dict[str, Socket], messages: Messages) -> None:
        self.flights = Flights()
        self._sockets = sockets
        self._messages = messages
        self._senders: dict[str, str] = {}

    def heard(self, user: str, frame: Frame, at: float) -> None:
        """A frame came in."""
        sender = self._senders.get(frame.client_msg_id)
        if frame.t == "sent" and sender is not None:
            self.flights.answered[frame.client_msg_id] = at
        elif frame.t == "event" and sender not in (None, user):
            self.flights.arrive((user, frame.conversation_id), frame.client_msg_id, frame.seq, at)

    async def turn(self, settings: Settings) -> Figures:
        """One turn."""
        self.flights = flights = Flights()

        async def call(_: int, counts: bool) -> None:  # noqa: FBT001 - the loop's own call
            message = self._messages.next()
            self._senders[message.client_msg_id] = message.sender_id
            flights.expected.add(message.client_msg_id)
            before = await self._sockets[message.sender_id].send(message)
            if counts:
                flights.begun[message.client_msg_id] = before

        late = await open_loop(call, rate_s=settings.rate_s, warm_s=settings.warm_s, measure_s=settings.measure_s)
        await flights.wait()
        sent = [flights.answered[key] - at for key, at in flights.begun.items() if key in flights.answered]
        # `sent` trails the commit by the way back, so this is a little less than the time from commit to push.
        pushed = [max(0.0, flights.arrived[key] - at) for key, at in flights.answered.items() if key in flights.begun]
        return {
            **flights.figures(flights.begun),
            "sent_p50_ms": round(percentile(sent, 0.5) * 1000, 2),
            "sent_p99_ms": round(percentile(sent, 0.99) * 1000, 2),
            "sent_to_event_p50_ms": round(percentile(pushed, 0.5) * 1000, 2),
            "sent_to_event_p99_ms": round(percentile(pushed, 0.99) * 1000, 2),
            "repeated": flights.repeated,
            "disordered": flights.disordered,
            "started_late_p99_ms": round(late * 1000, 2),
        }


class _Record(msgspec.Struct):
    seq: int
    conversation_id: str
    client_msg_id: str


_RECORD = msgspec.json.Decoder(_Record)


@asynccontextmanager
async def _consuming(kafka: str, topic: str, got: Callable[[_Record, float], None]) -> AsyncIterator[None]:
    consumer = reader(kafka, client_id="bench-reference")
    await consumer.start()
    try:
        places = partitions([topic])
        consumer.assign(places)
        await consumer.seek_to_end(*places)

        async def read() -> None:
            async for record in consumer:
                got(_RECORD.decode(record.value), time.perf_counter())

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read())
            try:
                yield
            finally:
                reading.cancel()
    finally:
        await consumer.stop()


async def _reference(place: Reference, chats: list[Chat], settings: Settings, *, push: bool) -> Figures:
    await prepare(place.postgres, [chat.conversation_id for chat in chats])
    flights, messages = Flights(), Messages(chats)

    def got(record: _Record, at: float) -> None:
        flights.arrive(("", record.conversation_id), record.client_msg_id, record.seq, at)

    async def call(outbox: SeedOutbox, counts: bool) -> None:  # noqa: FBT001 - the loop's own call
        message = messages.next()
        flights.expected.add(message.client_msg_id)
        before = time.perf_counter()
        await outbox.send(message)
        flights.answered[message.client_msg_id] = time.perf_counter()
        if counts:
            flights.begun[message.client_msg_id] = before

    # In its best form: here the number of round trips would only be added to what it is not measured by.
    design = Design(pool=settings.pool, push=push, writing="at_once")
    async with (
        opened(place.postgres, place.kafka, place.topic, design) as outbox,
        _consuming(place.kafka, place.topic, got),
    ):
        late = await open_loop(
            lambda _, counts: call(outbox, counts),
            rate_s=settings.rate_s,
            warm_s=settings.warm_s,
            measure_s=settings.measure_s,
        )
        await flights.wait()
    committed = [flights.answered[key] - at for key, at in flights.begun.items()]
    return {
        **flights.figures(flights.answered),
        "commit_p50_ms": round(percentile(committed, 0.5) * 1000, 2),
        "commit_p99_ms": round(percentile(committed, 0.99) * 1000, 2),
        "repeated": flights.repeated,
        "disordered": flights.disordered,
        "started_late_p99_ms": round(late * 1000, 2),
    }


async def measure(of: Endpoints, settings: Settings) -> dict[str, object]:
    """Both sides in turn, and the medians of the turns: the result but for machine, date and command.

    Raises `RuntimeError` if a message is refused or does not arrive.
    """
    async with stage.reference(of) as place:
        chats = await stage.make_chats(of, pairs(settings.users, settings.chats, f"bench-{os.getpid()}"))
        users = sorted({user for chat in chats for user in chat.users})
        tokens = {user: mint(of.auth_secret, user, ttl_s=_TOKEN_S) for user in users}
        sockets: dict[str, Socket] = {}
        side = _Waybill(sockets, Messages(chats))
        turns: dict[str, list[Figures]] = {"waybill": [], "peer": [], "peer_after_commit": []}
        async with open_sockets(of.socket, tokens, side.heard) as opened_sockets:
            sockets.update(opened_sockets)
            ways: dict[str, Callable[[], Awaitable[Figures]]] = {
                "waybill": lambda: side.turn(settings),
                "peer": lambda: _reference(place, chats, settings, push=False),
                "peer_after_commit": lambda: _reference(place, chats, settings, push=True),
            }
            for number in range(settings.rounds):
                for name, way in ways.items():
                    turns[name].append(await way())
                    stage.say(f"round {number + 1} of {settings.rounds}, {name}: {turns[name][-1]}")
    found = {name: medians(of_side) for name, of_side in turns.items()}
    waybill = {name: found["waybill"][name] for name in ("p50_ms", "p99_ms")}
    return {
        "name": "e2e",
        "waybill": found["waybill"],
        "peer": found["peer"],
        "ratio": ratio(waybill, found["peer"]),
        "peer_after_commit": found["peer_after_commit"],
        "ratio_after_commit": ratio(waybill, found["peer_after_commit"]),
        "settings": asdict(settings),
        "turns": turns,
    }
