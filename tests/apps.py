"""Apps on devices: real SDK clients whose displays are noted as they happen, and people who talk through them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import uuid
from collections import defaultdict
from contextlib import asynccontextmanager
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from waybill_client import Client, MemoryStore, Timing, Unconfirmed

from services.console.demo import truth
from services.console.demo.recording import Pushed, Recording, Shown, Tick
from services.console.demo.verdict import judge
from shared.auth import mint
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from services.console.demo.verdict import Truth

_TOKEN_S = 3600
_OPEN_S = 60.0
_ANSWER_S = 120.0
_AGAIN_S = 0.5
_SETTLE_S = 120.0
_OPENED_AT_ONCE = 20

What = tuple[str, int, str]
"""Conversation, seq, event id."""


class App:
    """One device of a user. It may be closed and opened again: its store lasts.

    ``display`` is what is on the screen: like the raw list ``recording.shown``, but without what the server turned out
    to have lost. ``written``: messages that the user wrote here, by `client_msg_id` the conversation. ``seen``: when a
    message was displayed first. ``online``: what was told of users, as it came.
    """

    def __init__(self, url: str, secret: str, user_id: str, device_id: str = "phone", *, ping_s: float = 20.0) -> None:
        self.url = url
        self.user_id = user_id
        self.recording = Recording(user_id, f"{user_id}.{device_id}")
        self.display: list[What] = []
        self.written: dict[str, str] = {}
        self.seen: dict[str, float] = {}
        self.online: dict[str, list[bool | None]] = defaultdict(list)
        self.rewinds: list[tuple[str, int]] = []
        self._token = mint(secret, user_id, ttl_s=_TOKEN_S)
        self._timing = Timing(random.random, ping_s=ping_s)
        self._store = MemoryStore()
        self._client: Client | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._session = 0

    @property
    def client(self) -> Client:
        assert self._client is not None, f"{self.recording.device_id} is closed"
        return self._client

    @property
    def sessions(self) -> int:
        """How often it has said `hello`."""
        return self._session

    @property
    def shown(self) -> set[What]:
        return set(self.display)

    async def open(self) -> None:
        """Returns once all conversations are listed."""
        client = Client(
            self.url,
            self._token,
            self.recording.device_id,
            self._store,
            timing=self._timing,
            on_frame=self._frame,
            on_rewind=self._rewound,
        )
        await client.__aenter__()
        self._client = client
        self._loops = [
            asyncio.create_task(loop) for loop in (self._show(client), self._tick(client), self._note_presence(client))
        ]
        await client.ready(_OPEN_S)

    async def close(self) -> None:
        """Raises what stopped the client, if something did."""
        if self._client is None:
            return
        client, self._client = self._client, None
        for loop in self._loops:
            loop.cancel()
        ends = await asyncio.gather(*self._loops, return_exceptions=True)
        await client.close()
        faults = [end for end in ends if not isinstance(end, asyncio.CancelledError | None)]
        if faults:
            raise faults[0]

    async def say(self, conversation_id: str, text: str) -> None:
        """Write a message, and ask until it is committed. Not for an app that is closed meanwhile."""
        client_msg_id = str(uuid.uuid4())
        self.written[client_msg_id] = conversation_id
        while True:
            try:
                sent = await self.client.send(
                    conversation_id, {"text": text}, client_msg_id=client_msg_id, timeout_s=_ANSWER_S
                )
            except Unconfirmed:
                await asyncio.sleep(_AGAIN_S)
            else:
                self.recording.acked[client_msg_id] = (sent.conversation_id, sent.event_id)
                return

    async def _show(self, client: Client) -> None:
        async for event in client.events():
            now = asyncio.get_running_loop().time()
            self.recording.shown.append(Shown(event.conversation_id, event.seq, event.event_id, now))
            self.display.append((event.conversation_id, event.seq, event.event_id))
            self.seen.setdefault(event.client_msg_id, now)

    async def _tick(self, client: Client) -> None:
        async for one in client.receipts():
            read = one.read_version, one.read_seq
            self.recording.ticks.append(Tick(one.conversation_id, one.user_id, one.delivered_seq, read))

    async def _note_presence(self, client: Client) -> None:
        async for one in client.presences():
            self.online[one.user_id].append(one.online)

    def _rewound(self, conversation_id: str, seq: int) -> None:
        self.rewinds.append((conversation_id, seq))
        self.display = [one for one in self.display if one[0] != conversation_id or one[1] <= seq]

    def _frame(self, direction: str, text: str, at: float) -> None:
        frame: dict[str, Any] = json.loads(text)
        recording, conversation_id = self.recording, frame.get("conversation_id", "")
        match direction, frame.get("t"):
            case "out", "hello":
                self._session += 1
                recording.opened[self._session] = at
            case "in", "welcome":
                recording.resend_s[self._session] = frame["limits"]["resend_s"]
            case "out", "send":
                recording.written.setdefault(frame["client_msg_id"], at)
            case "in", "event":
                what = frame["seq"], frame["event_id"], frame["client_msg_id"]
                recording.pushed.append(Pushed(self._session, conversation_id, *what, at))
            case "in", "conversation":
                recording.starts.setdefault((self._session, conversation_id), frame["cursor"])


@asynccontextmanager
async def opened(apps: Sequence[App]) -> AsyncIterator[None]:
    """The apps are open, a few at a time, and closed at the end."""
    try:
        for some in _parts(apps, _OPENED_AT_ONCE):
            await asyncio.gather(*(app.open() for app in some))
        yield
    finally:
        ends = await asyncio.gather(*(app.close() for app in apps), return_exceptions=True)
    faults = [end for end in ends if end is not None]
    if faults:
        raise faults[0]


@asynccontextmanager
async def talk(places: Sequence[tuple[App, str]], *, every_s: float, text: str = "hello") -> AsyncIterator[None]:
    """Meanwhile somebody says something every ``every_s`` seconds, by turns at each of these apps and conversations.

    Ends once all of it is committed.
    """
    stop = asyncio.Event()

    async def pace() -> None:
        due = loop.time()
        for app, conversation_id in itertools.cycle(places):
            if stop.is_set():
                return
            saying.add(asyncio.create_task(app.say(conversation_id, text)))
            saying.difference_update([one for one in saying if one.done() and one.exception() is None])
            due = max(due + every_s, loop.time() - every_s)
            await asyncio.sleep(max(0.0, due - loop.time()))

    loop = asyncio.get_running_loop()
    saying: set[asyncio.Task[None]] = set()
    pacing = asyncio.create_task(pace())
    try:
        yield
    finally:
        stop.set()
        await pacing
        _, late = await asyncio.wait(saying, timeout=_SETTLE_S) if saying else (set(), set())
        for one in late:
            one.cancel()
    for one in saying:
        await one


async def read(owner_url: str, conversations: Sequence[str]) -> Truth:
    """What Postgres holds of these conversations."""
    return await truth.read(owner_url, conversations)


async def displayed(held: Truth, apps: Iterable[App], timeout: float = _SETTLE_S) -> None:
    """Wait until each app displays all that its user may see."""
    waiting = {app: set(held.expected(app.user_id)) for app in apps}

    def all_there() -> bool:
        for app in [app for app, expected in waiting.items() if expected <= app.shown]:
            del waiting[app]
        return not waiting

    try:
        await until(all_there, timeout=timeout, what="every device displays all")
    except TimeoutError:
        lacks = {app.recording.device_id: len(expected - app.shown) for app, expected in waiting.items()}
        raise AssertionError(f"events that were never displayed: {lacks}") from None


async def ticked(owner_url: str, conversations: Sequence[str], apps: Iterable[App], timeout: float = _SETTLE_S) -> None:
    """Wait until everybody's delivered tick is at the head, and the apps show so of direct chats' peers."""

    async def all_there() -> bool:
        return await truth.behind(owner_url, conversations) == 0

    await until(all_there, timeout=timeout, what="every member's delivered tick is at the head")
    held = await read(owner_url, conversations)
    heads = {id_: max(events) for id_, events in held.events.items()}
    peers = {id_: {user for chat, user in held.visible if chat == id_} for id_ in conversations}
    wanted = {
        (app, id_, other)
        for app in apps
        for id_ in conversations
        if len(peers[id_]) == 2 and app.user_id in peers[id_]
        for other in peers[id_] - {app.user_id}
    }

    def shown() -> bool:
        for app, id_, other in list(wanted):
            ticks = app.recording.ticks
            if any(
                (one.conversation_id, one.user_id) == (id_, other) and one.delivered_seq >= heads[id_] for one in ticks
            ):
                wanted.discard((app, id_, other))
        return not wanted

    await until(shown, timeout=timeout, what="the ticks of direct chats are displayed")


def hold(held: Truth, apps: Sequence[App]) -> None:
    """Nothing was lost, doubled, disordered or jumped over, and no tick went back, by the raw lists of all apps."""
    verdict = judge(held, [app.recording for app in apps])
    assert verdict.good, (verdict.figures(), verdict.strangers, verdict.notes)
    for app in apps:
        assert app.recording.acked.keys() == app.written.keys(), "a message that was never committed"


def latencies(apps: Sequence[App], since: float, upto: float) -> list[float]:
    """Seconds from the writing of a message to its display on each other user's devices that showed it, ascending.

    Of what was written between these times of the loop's clock.
    """
    return sorted(
        app.seen[client_msg_id] - at
        for sender in apps
        for client_msg_id, at in sender.recording.written.items()
        if since <= at < upto
        for app in apps
        if app.user_id != sender.user_id and client_msg_id in app.seen
    )


def percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def repeats(apps: Iterable[App]) -> int:
    """How often an event was pushed to a session that had got it already."""
    count = 0
    for app in apps:
        pushed = [(one.session, one.conversation_id, one.seq) for one in app.recording.pushed]
        count += len(pushed) - len(set(pushed))
    return count


def _parts(apps: Sequence[App], size: int) -> Iterable[Sequence[App]]:
    return (apps[start : start + size] for start in range(0, len(apps), size))
