"""Sends of all sessions, forwarded to ingest in batches over HTTP.

Order: a batch holds whole runs of a (sender, conversation), and no other batch in flight holds the same one, so that
one connection's sends to a conversation commit in the order in which they came, as long as each succeeds at first try.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from services.gateway.answers import CREATED, PROBLEM, RESULTS, SETTINGS
from services.gateway.metrics import SENDS_WAITING
from shared.auth import mint
from shared.errors import InternalError, TimedOutError, UnavailableError, WaybillError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from services.gateway.answers import Created, Outcome, OwnSettings
    from shared.contracts.frames import Create, Send, Settings

_BATCH = 500
_BATCH_BYTES = 4 * 1024 * 1024
_LEAST_S = 0.5
"""Least time that a batch gets, however long its oldest send has waited."""

_AT_ONCE = 8
_TOKEN_S = 300
_KEEP_S = 3.0
"""Ingest closes what is idle for 5 s: a connection must not be used in that very moment."""

_RETRY_MS = 1000
_LOOP = LOOP_ERRORS.labels("sends")


Key = tuple[str, str]


@dataclass(slots=True)
class Pending:
    """A send that waits for ingest. ``answer`` is called once. ``size``: bytes of its body."""

    sender_id: str
    device_id: str
    send: Send
    answer: Callable[[Outcome], None]
    deadline: float
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.send.body_bytes

    def item(self) -> dict[str, object]:
        """The item of `POST /v1/events`."""
        send = self.send
        out: dict[str, object] = {
            "conversation_id": send.conversation_id,
            "sender_id": self.sender_id,
            "device_id": self.device_id,
            "client_msg_id": send.client_msg_id,
            "type": send.type,
        }
        if bytes(send.body):
            out["body"] = send.body
        if send.target_seq is not None:
            out["target_seq"] = send.target_seq
        if send.traceparent is not None:
            out["traceparent"] = send.traceparent
        return out


@dataclass(slots=True)
class Runs:
    """Sends in runs of (sender, conversation); a key that is in flight gives nothing out. Pure."""

    waiting: dict[Key, deque[Pending]] = field(default_factory=dict)
    ready: dict[Key, None] = field(default_factory=dict)
    in_flight: set[Key] = field(default_factory=set)
    size: int = 0

    def add(self, key: Key, pending: Pending) -> None:
        """One more, behind the others of its key."""
        self.waiting.setdefault(key, deque()).append(pending)
        self.size += 1
        if key not in self.in_flight:
            self.ready[key] = None

    def take(self, most: int, most_bytes: int) -> dict[Key, list[Pending]]:
        """A batch of at most ``most``, keys in turn; its keys are in flight until `done`.

        It is closed by the send with which it has ``most_bytes`` of bodies.
        """
        batch: dict[Key, list[Pending]] = {}
        left, bytes_left = most, most_bytes
        while self.ready and left > 0 and bytes_left > 0:
            key = next(iter(self.ready))
            del self.ready[key]
            queue, run = self.waiting[key], []
            while queue and left > 0 and bytes_left > 0:
                run.append(queue.popleft())
                left -= 1
                bytes_left -= run[-1].size
            if not queue:
                del self.waiting[key]
            self.in_flight.add(key)
            batch[key] = run
        self.size -= most - left
        return batch

    def done(self, batch: dict[Key, list[Pending]]) -> None:
        """The batch has its answer."""
        for key in batch:
            self.in_flight.discard(key)
            if key in self.waiting:
                self.ready[key] = None


class Sends:
    """Forwards sends, creates and settings to ingest under the scope `gateway`; each item has the rights of its user.

    ``most``: sends that wait for their turn; ``most_bytes``: of the bodies of all that have no answer yet.
    """

    def __init__(self, ingest_url: str, secret: str, *, timeout_s: float, most: int, most_bytes: int) -> None:
        self._url = ingest_url.rstrip("/")
        self._secret = secret
        self._timeout_s = timeout_s
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._runs = Runs()
        self._some = asyncio.Event()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._token = ""
        self._token_until = 0.0
        self._http: aiohttp.ClientSession | None = None

    def submit(self, sender_id: str, device_id: str, send: Send, answer: Callable[[Outcome], None]) -> None:
        """Queue a send of a user's device; ``answer`` gets what ingest said, or why that is not known.

        Raises `UnavailableError` if too many wait.
        """
        pending = Pending(sender_id, device_id, send, answer, time.monotonic() + self._timeout_s)
        if self._runs.size >= self._most or self._bytes + pending.size > self._most_bytes:
            raise UnavailableError("too many sends wait", retry_after_ms=_RETRY_MS)
        self._bytes += pending.size
        self._runs.add((sender_id, send.conversation_id.lower()), pending)
        SENDS_WAITING.set(self._runs.size)
        self._some.set()

    async def create(self, creator_id: str, create: Create) -> Created:
        """Make a conversation. Raises what ingest answers, `TimedOutError` or `UnavailableError`."""
        body: dict[str, object] = {
            "kind": create.kind,
            "members": create.members,
            "creator_id": creator_id,
            "history": create.history,
        }
        if create.title is not None:
            body["title"] = create.title
        if create.conversation_id is not None:
            body["conversation_id"] = create.conversation_id
        return CREATED.decode(await self._post("/v1/conversations", body, self._timeout_s))

    async def set_settings(self, user_id: str, device_id: str, settings: Settings) -> OwnSettings:
        """Set the user's own settings of a conversation. Raises as `create`."""
        body = {
            "user_id": user_id,
            "device_id": device_id,
            "muted": settings.muted,
            "muted_until": settings.muted_until,
            "archived": settings.archived,
        }
        path = f"/v1/conversations/{settings.conversation_id.lower()}/settings"
        return SETTINGS.decode(await self._call("PUT", path, body, self._timeout_s))

    async def run(self) -> None:
        """Forward until cancelled; what waits then is answered `unavailable`."""
        connector = aiohttp.TCPConnector(limit=_AT_ONCE * 2, keepalive_timeout=_KEEP_S)
        async with aiohttp.ClientSession(connector=connector) as self._http:
            try:
                async with asyncio.TaskGroup() as batches:
                    while True:
                        await self._some.wait()
                        self._some.clear()
                        while self._runs.ready:
                            await self._turns.acquire()
                            batch = self._runs.take(_BATCH, _BATCH_BYTES)
                            batches.create_task(self._forward(batch))
            finally:
                while self._runs.size:
                    self._runs.ready.update(dict.fromkeys(self._runs.waiting))
                    self._answer_all(
                        self._runs.take(_BATCH, _BATCH_BYTES),
                        UnavailableError("the gateway stops", retry_after_ms=_RETRY_MS),
                    )

    async def _forward(self, batch: dict[Key, list[Pending]]) -> None:
        try:
            now = time.monotonic()
            for run in batch.values():
                while run and run[0].deadline < now:
                    self._give(run.pop(0), TimedOutError("no answer in time"))
            items = [pending for run in batch.values() for pending in run]
            if not items:
                return
            try:
                patience = max(min(_LEAST_S, self._timeout_s), min(item.deadline for item in items) - now)
                answer = await self._post("/v1/events", {"events": [pending.item() for pending in items]}, patience)
                outcomes = _outcomes(answer, len(items))
            except WaybillError as error:
                self._answer_all(batch, error)
            except msgspec.MsgspecError:
                logger(__name__).exception("ingest's answer cannot be read")
                self._answer_all(batch, InternalError("the answer cannot be read"))
            except Exception:  # noqa: BLE001 - a fault in one batch ends neither its sessions nor the service
                _LOOP.inc()
                logger(__name__).exception("a batch was not forwarded")
                self._answer_all(batch, InternalError("a fault of the server"))
            else:
                for pending, outcome in zip(items, outcomes, strict=True):
                    self._give(pending, outcome)
        finally:
            self._turns.release()
            self._runs.done(batch)
            SENDS_WAITING.set(self._runs.size)
            self._some.set()

    def _answer_all(self, batch: dict[Key, list[Pending]], error: WaybillError) -> None:
        for run in batch.values():
            for pending in run:
                self._give(pending, error)

    def _give(self, pending: Pending, outcome: Outcome) -> None:
        self._bytes -= pending.size
        try:
            pending.answer(outcome)
        except Exception:  # noqa: BLE001 - one session's fault leaves no other send without its answer
            _LOOP.inc()
            logger(__name__).exception("an answer was not taken")

    async def _post(self, path: str, body: Mapping[str, object], timeout_s: float) -> bytes:
        return await self._call("POST", path, body, timeout_s)

    async def _call(self, method: str, path: str, body: Mapping[str, object], timeout_s: float) -> bytes:
        if self._http is None:
            raise UnavailableError("the gateway starts", retry_after_ms=_RETRY_MS)
        headers = {"Authorization": f"Bearer {self._bearer()}", "Content-Type": "application/json"}
        try:
            async with self._http.request(
                method,
                self._url + path,
                data=msgspec.json.encode(body),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as answer:
                text = await answer.read()
        except TimeoutError:
            raise TimedOutError("no answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError("ingest is away", retry_after_ms=_RETRY_MS) from error
        if answer.status in (200, 201):
            return text
        try:
            raise PROBLEM.decode(text).raised()
        except msgspec.MsgspecError:
            raise UnavailableError(f"ingest answered {answer.status}", retry_after_ms=_RETRY_MS) from None

    def _bearer(self) -> str:
        now = time.monotonic()
        if now >= self._token_until:
            self._token = mint(self._secret, "gateway", scope="gateway", ttl_s=_TOKEN_S)
            self._token_until = now + _TOKEN_S / 2
        return self._token


def _outcomes(answer: bytes, count: int) -> list[Outcome]:
    outcomes = [result.outcome() for result in RESULTS.decode(answer).results]
    if len(outcomes) != count:
        raise InternalError("ingest answered another number of results")
    return outcomes
