"""The gateway's process."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from services.gateway.acks import Acks
from services.gateway.catchup import CatchUp
from services.gateway.clock import Clock
from services.gateway.connection import Connection
from services.gateway.drain import Renewal, drain
from services.gateway.fanout import Fanout
from services.gateway.gauges import Gauges
from services.gateway.group_receipts import SoFar
from services.gateway.hello import Greeter
from services.gateway.kicks import Kicks
from services.gateway.letters import Letters
from services.gateway.limits import Limits, Rate
from services.gateway.link import Link
from services.gateway.listener import serving, tls_context
from services.gateway.loading import Loader
from services.gateway.metrics import GAP_EVENTS
from services.gateway.opening import Opener
from services.gateway.parent import Parent
from services.gateway.parts import Parts
from services.gateway.presence import Presence, Sharing
from services.gateway.processes import supervise
from services.gateway.sends import Sends
from services.gateway.settings import GatewaySettings
from services.gateway.social import Social
from services.gateway.spread import Spread
from services.gateway.stream import Stream
from services.gateway.sweep import Sweep
from services.gateway.transitions import Transitions
from services.gateway.typing import Typing
from services.gateway.upgrade import Policy
from shared.auth import Verifier
from shared.contracts import frames
from shared.errors import UnavailableError
from shared.health import private_app
from shared.kafka import Topics
from shared.logging import logger
from shared.postgres import open_pool
from shared.runtime import http, run
from shared.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine

    from services.gateway.feed import Feed
    from services.gateway.follower import Follower
    from shared.postgres import Pool

_ACKS_S = 5.0
_PRESENCE_S = 1.0
_CHORES_S = 2.0
_GRACE_S = 2.0
"""How long Kafka may take to bring what the sweep has read."""

_TURN_S = 0.004
"""How long feeds are visited before the loop looks at anything else."""

_EVENTS_PAUSE_S = 0.005
_RECEIPTS_PAUSE_S = 0.02
"""A tick may wait a little longer than a message; every read costs, here and in the broker."""

_ROUND_ROBIN_READS = 2
"""Batches of hellos that are read at a time."""


class Gateway:
    """All parts of a gateway, tied together. What `run` starts ends when it is cancelled."""

    def __init__(self, settings: GatewaySettings, pool: Pool, tasks: asyncio.TaskGroup) -> None:
        self.settings = settings
        self.pool = pool
        self._tasks = tasks
        loop = asyncio.get_running_loop()
        topics = Topics(settings.topic_prefix)
        client_id = f"waybill-gateway-{settings.gateway_name}"
        self.sessions: set[Connection] = set()
        self.transitions = Transitions(pool)
        self._letters = Letters(pool, settings.kafka_bootstrap, topics)
        self.fanout = Fanout(
            ring=settings.gateway_ring, rings_bytes=settings.gateway_ring_bytes, linger_s=settings.gateway_linger_s
        )
        self.fanout.out.queued = _turns(loop, self.fanout)
        self.fanout.out.later = self.fanout.watching.later = loop.call_later
        self.fanout.gap = self._gap
        self.fanout.other_store = self._store_changed
        self.acks = Acks(
            settings.kafka_bootstrap,
            topics.acks,
            flush_s=settings.gateway_ack_flush_ms / 1000,
            later_s=settings.gateway_group_ack_ms / 1000,
            client_id=client_id,
        )
        self._sends = Sends(
            str(settings.ingest_url),
            settings.secret.get_secret_value(),
            timeout_s=settings.gateway_send_timeout_s,
            most=settings.gateway_send_queue,
            most_bytes=settings.gateway_send_queue_bytes,
        )
        self._link = Link(str(settings.redis_url), prefix=settings.topic_prefix)
        self.presence = Presence(
            self._link,
            Sharing(pool),
            prefix=settings.topic_prefix,
            gateway=settings.gateway_name,
            refresh_s=settings.gateway_heartbeat_s,
            grace_s=settings.gateway_presence_grace_s,
        )
        self.fanout.membership = self.presence.membership_changed
        limits = Limits(*_rates(settings))
        self._spread = Spread(self._link, limits, prefix=settings.topic_prefix)
        typing = Typing(self._link, self._feeds_of, prefix=settings.topic_prefix, most=settings.gateway_typing_most)
        self._typing = typing
        self._social = Social(self.fanout, self.presence, typing, limits, self.transitions)
        self.kicks = self._social.kicks = Kicks(
            self._link, prefix=settings.topic_prefix, replaced=self._social.replaced, revoked=self._social.hinted
        )
        self._sweep = Sweep(
            pool,
            self.fanout,
            kafka_away=self._kafka_away,
            store_changed=self._store_changed,
            replaced=self._social.replaced,
            revoked=self._social.revoke,
            found=self._swept,
            every_s=settings.gateway_sweep_s,
            away_s=min(1.0, settings.gateway_sweep_s),
            grace_s=min(_GRACE_S, settings.gateway_sweep_s / 2),
            lag_s=self._lag_s,
        )
        self.streams = [
            Stream(
                settings.kafka_bootstrap,
                topics,
                topic,
                self.fanout,
                client_id=f"{client_id}-{topic}",
                pause_s=pause_s,
                sweep=self._sweep,
                letters=self._letters,
            )
            for topic, pause_s in ((topics.events, _EVENTS_PAUSE_S), (topics.receipts, _RECEIPTS_PAUSE_S))
        ]
        self._opener = Opener(pool, gateway=settings.gateway_name)
        self._greeter = Greeter(pool, self.fanout, self._opener, at_once=_ROUND_ROBIN_READS, spawn=tasks.create_task)
        self._loader = Loader(pool)
        self._catch_up = CatchUp(pool, self.fanout, at_once=settings.gateway_reads, page=settings.gateway_page)
        self._gauges = Gauges(self.sessions, self.fanout)
        self._clock = Clock(self._chores, every_s=_CHORES_S)
        self._renewal = Renewal(settings.gateway_drain_s, tasks.create_task)
        asking = asyncio.Semaphore(max(1, settings.postgres_pool // 2))
        self.parts = Parts(
            settings=settings,
            pool=pool,
            verifier=Verifier(settings),
            fanout=self.fanout,
            catch_up=self._catch_up,
            asking=asking,
            acks=self.acks,
            sends=self._sends,
            clock=self._clock,
            greeter=self._greeter,
            loader=self._loader,
            social=self._social,
            transitions=self.transitions,
            so_far=SoFar(pool, asking, tasks.create_task),
            spawn=tasks.create_task,
            sessions=self.sessions,
        )

    def start(self) -> list[asyncio.Task[None]]:
        """Start every loop."""
        loops = {
            **{f"stream-{number}": stream.run() for number, stream in enumerate(self.streams)},
            "catch-up": self._catch_up.run(),
            "loading": self._loader.run(),
            "opening": self._opener.run(),
            "acks": self.acks.run(),
            "sends": self._sends.run(),
            "clock": self._clock.run(),
            "sweep": self._sweep.run(),
            "transitions": self.transitions.run(),
            "letters": self._letters.run(),
            "redis": self._link.run(),
            "presence": self.presence.run(),
            "typing": self._typing.run(),
            "kicks": self.kicks.run(),
            "rates": self._spread.run(),
        }
        return [self._tasks.create_task(loop, name=name) for name, loop in loops.items()]

    async def started(self) -> None:
        """Wait until positions are fixed, in Kafka and in the outbox: before any `hello` reads heads."""
        for stream in self.streams:
            await stream.started.wait()
        await self._sweep.started.wait()

    async def serve(self, stop: asyncio.Event, serving_: asyncio.Event, *, shares_port: bool) -> None:
        """Accept sessions until ``stop`` is set; then send them elsewhere, and wait until their acks are kept."""
        settings = self.settings
        tls = None
        if settings.gateway_tls_certificate is not None and settings.gateway_tls_key is not None:
            tls = tls_context(settings.gateway_tls_certificate, settings.gateway_tls_key)
        async with serving(
            settings.host,
            settings.gateway_port,
            lambda wire: Connection(wire, self.parts),
            policy=_policy(settings),
            ssl=tls,
            reuse_port=shares_port,
        ) as listener:
            self._gauges.listener = listener
            logger(__name__).info("serving", port=listener.port)
            serving_.set()
            await stop.wait()
            serving_.clear()
            listener.stop_accepting()
            await drain(self.sessions, settings.gateway_drain_s)

    async def flush(self) -> None:
        """Wait, not for long, until what sessions left behind is kept."""
        if not await self.acks.drained(_ACKS_S):
            logger(__name__).warning("acks were not confirmed by Kafka; clients' cursors bring them again")
        if self._link.available:
            await self.presence.drained(_PRESENCE_S)
        try:
            await self.transitions.flush()
        except UnavailableError as error:
            logger(__name__).warning("transitions were not written", error=error.message)
        try:
            await self._letters.flush()
        except UnavailableError as error:
            logger(__name__).warning("bad records were not put on the desk", error=error.message)

    def checks(self, serving_: asyncio.Event) -> dict[str, Callable[[], Coroutine[None, None, str | None]]]:
        """What readiness depends on. Kafka or Redis away is told by metrics: sessions are served without them."""

        async def postgres() -> str | None:
            await self.pool.fetchval("SELECT 1")
            return None

        async def sockets() -> str | None:
            if serving_.is_set():
                return None
            away = [stream.away for stream in self.streams if not stream.started.is_set() and stream.away]
            return f"positions in Kafka are not fixed: {away[0]}" if away else "not open"

        return {"postgres": postgres, "sockets": sockets}

    def _feeds_of(self, conversation_id: str) -> Collection[tuple[Follower, Feed]]:
        room = self.fanout.rooms.get(conversation_id)
        return () if room is None else room.feeds.items()

    def _kafka_away(self) -> bool:
        return any(stream.away is not None for stream in self.streams)

    def _lag_s(self) -> float:
        return max(stream.lag_s for stream in self.streams)

    def _gap(self, conversation_id: str, first: int, last: int) -> None:
        GAP_EVENTS.inc(last - first + 1)
        self.transitions.note("cursor", "gap", conversation_id=conversation_id, from_seq=first, to_seq=last)

    def _swept(self, conversation_id: str, first: int, last: int) -> None:
        self.transitions.note("cursor", "swept", conversation_id=conversation_id, from_seq=first, to_seq=last)

    def _store_changed(self) -> None:
        """Seqs may belong to other events than before: nobody may go on from what this gateway remembers."""
        if self._renewal.begin(self.sessions):
            logger(__name__).warning("the store was replaced: all sessions begin anew")
            self.transitions.note("store", "changed")
        self._greeter.forget()
        self.fanout.forget()

    def _chores(self, now: float) -> None:
        self.fanout.tidy(now)
        self._gauges.set()


def _turns(loop: asyncio.AbstractEventLoop, fanout: Fanout) -> Callable[[], None]:
    """Visits feeds in the loop's next turn, and the next one while there is more to do."""
    scheduled = False

    def turn() -> None:
        nonlocal scheduled
        try:
            scheduled = fanout.turn(time.monotonic() + _TURN_S)
        except Exception:  # noqa: BLE001 - a fault at one conversation must not end delivery to all others
            logger(__name__).exception("feeds could not be visited")
            scheduled = True
        if scheduled:
            loop.call_soon(turn)

    def queued() -> None:
        nonlocal scheduled
        if not scheduled:
            scheduled = True
            loop.call_soon(turn)

    return queued


def _rates(settings: GatewaySettings) -> tuple[dict[str, Rate], dict[str, Rate]]:
    """Rates of a session, and of a user."""
    rates = {
        "frames": Rate(settings.gateway_frames_per_s, settings.gateway_frames_burst),
        "sends": Rate(settings.gateway_sends_per_s, settings.gateway_sends_burst),
        "pulls": Rate(settings.gateway_pulls_per_s, settings.gateway_pulls_burst),
        "creates": Rate(settings.gateway_creates_per_s, settings.gateway_creates_burst),
        "presence": Rate(settings.gateway_presence_per_s, settings.gateway_presence_burst),
    }
    return rates, {kind: rate for kind, rate in rates.items() if kind != "frames"}


def _policy(settings: GatewaySettings) -> Policy:
    return Policy(
        origins=settings.gateway_origins,
        trusted_proxies=settings.gateway_trusted_proxies,
        handshake_s=settings.gateway_hello_s,
        first_message_bytes=frames.HELLO_BYTES,
        buffer_bytes=settings.gateway_buffer_bytes,
        send_buffer_bytes=settings.gateway_send_buffer_bytes,
        most_connections=settings.gateway_connections,
        most_per_address=settings.gateway_address_connections,
    )


async def serve(settings: GatewaySettings, stop: asyncio.Event, parent: Parent | None = None) -> None:
    """Run a gateway until ``stop`` is set, then drain it. ``parent``: the process of which this is one of several."""
    async with (
        open_pool(str(settings.postgres_url), size=settings.postgres_pool, name="waybill-gateway") as pool,
        asyncio.TaskGroup() as tasks,
    ):
        gateway = Gateway(settings, pool, tasks)
        open_ = asyncio.Event()
        loops = gateway.start()
        app = private_app(gateway.checks(open_))
        async with http(app, settings.private_host, settings.gateway_private_port) as port:
            watching = None
            if parent is not None:
                parent.opened(port)
                watching = tasks.create_task(parent.watch(stop), name="parent")
            stopping = tasks.create_task(stop.wait(), name="stopping")
            starting = tasks.create_task(gateway.started(), name="starting")
            await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
            starting.cancel()
            if not stop.is_set():
                await gateway.serve(stop, open_, shares_port=parent is not None)
                await gateway.flush()
            if watching is not None:
                watching.cancel()
        for loop in loops:
            loop.cancel()


def main() -> None:
    """Entry of the process."""
    settings = load(GatewaySettings)
    parent = Parent.of(os.environ)
    if parent is None and settings.gateway_processes > 1:
        raise SystemExit(supervise(settings, settings.gateway_processes))
    run("gateway", settings.log_level, lambda stop: serve(settings, stop, parent))


if __name__ == "__main__":
    main()
