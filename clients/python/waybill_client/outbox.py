"""Requests that wait for their answer, asked again until there is one. Pure: time and chance are handed in.

A request keeps its key and its content for life; each attempt gets a ``rid`` of its own, so that the error of an
abandoned attempt can't end a newer one. Requests leave in the order in which they were made, after a reconnect too; a
bounded number is under way at a time.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import errors
from ._frames import encode
from .pacing import MAX_IN_FLIGHT, Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .stats import Stats

Key = tuple[str, str, str]
"""(frame type, conversation id or "", id): what the caller knows a request by."""

RETRY_BASE_S = 0.2
RETRY_CAP_S = 10.0
ENVELOPE_BYTES = 64
"""Room for the type and ``rid`` of a frame."""
INTERNAL_ATTEMPTS = 5
"""``internal`` may be this request's own fault; unlike an outage it is not asked again for ever."""


@dataclass(slots=True)
class Pending:
    """One request. ``fields`` is the frame's JSON from the first field after ``rid`` to the closing brace."""

    key: Key
    fields: bytes
    number: int
    strict: bool = False
    attempts: int = 0
    rid: str | None = None
    ticket: int = 0
    queued: bool = False


class Outbox:
    """All unanswered requests of a client."""

    def __init__(self, random: Callable[[], float], answer_timeout_s: float, stats: Stats) -> None:
        self._random = random
        self._stats = stats
        self._answer_timeout_s = answer_timeout_s
        self._pending: dict[Key, Pending] = {}
        self._waiting: dict[str, tuple[Pending, float]] = {}
        self._later: list[tuple[float, int, Key]] = []
        self._queue: list[tuple[int, Key]] = []
        self._order: dict[str, dict[Key, Pending]] = {}
        self._number = 0
        self.pace = Pace()
        self.frame_bytes: int | None = None
        self.online = False

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, key: Key) -> bool:
        return key in self._pending

    def __iter__(self) -> Iterator[Key]:
        return iter(self._pending)

    def check(self, key: Key, fields: bytes) -> None:
        """Raise ``TooLarge`` or ``ClientMsgIdReused`` for what the server would refuse, as far as that is known."""
        if self.frame_bytes is not None and len(fields) + ENVELOPE_BYTES > self.frame_bytes:
            raise errors.TooLarge(f"over {self.frame_bytes} bytes", field="body")
        pending = self._pending.get(key)
        if pending is not None and pending.fields != fields:
            raise errors.ClientMsgIdReused("another content waits under this id", field="client_msg_id")

    def add(self, key: Key, fields: bytes, now: float, *, strict: bool = False) -> list[bytes]:
        """Take a request; return its frame if it can leave at once. A key that waits already changes nothing.

        A ``strict`` one leaves only when no earlier one of the same type and conversation waits.
        """
        if key in self._pending:
            return []
        self._number += 1
        pending = self._pending[key] = Pending(key, fields, self._number, strict)
        self._order.setdefault(key[1], {})[key] = pending
        if not self.online or self._blocked(pending):
            return []
        return [*self._ready(pending, now), *self._leaving(now)]

    def released(self, conversation_id: str, now: float) -> list[bytes]:
        """Return the frames of what an answer in this conversation has made room for."""
        if not self.online:
            return []
        waiting = self._order.get(conversation_id)
        first = next(iter(waiting.values())) if waiting else None
        frames: list[bytes] = []
        if first is not None and first.strict and first.rid is None and not first.ticket:
            frames = self._ready(first, now)
        return frames + self._leaving(now)

    def aimed_above(self, conversation_id: str, seq: int) -> list[Key]:
        """Return the sends of a conversation whose target lies above ``seq``."""
        return [
            key
            for key, pending in self._order.get(conversation_id, {}).items()
            if key[0] == "send" and (json.loads(b"{" + pending.fields).get("target_seq") or 0) > seq
        ]

    def connected(self, frame_bytes: int | None, now: float) -> tuple[list[bytes], list[Key]]:
        """Return the frames of what is unanswered and may leave, and the keys of what is larger than allowed."""
        self.online = True
        self.frame_bytes = frame_bytes
        too_large = [
            key
            for key, pending in self._pending.items()
            if frame_bytes is not None and len(pending.fields) + ENVELOPE_BYTES > frame_bytes
        ]
        for key in too_large:
            self.answered(key)
        ready = [pending for pending in self._pending.values() if not self._blocked(pending)]
        frames = [frame for pending in ready for frame in self._ready(pending, now)]
        return frames + self._leaving(now), too_large

    def disconnected(self) -> None:
        """Forget which attempts were under way: their answers can't come any more."""
        self.online = False
        self._waiting.clear()
        self._later.clear()
        self._queue.clear()
        for pending in self._pending.values():
            pending.rid = None
            pending.ticket = 0
            pending.queued = False

    def owner(self, rid: str | None) -> Key | None:
        """Return the key of the attempt with this ``rid``, None if it is no present one."""
        waiting = self._waiting.get(rid) if isinstance(rid, str) else None
        return waiting[0].key if waiting else None

    def answered(self, key: Key) -> bool:
        """End a request; False if it had ended before."""
        pending = self._pending.pop(key, None)
        if pending is None:
            return False
        waiting = self._order[key[1]]
        del waiting[key]
        if not waiting:
            del self._order[key[1]]
        if pending.rid is not None:
            self._waiting.pop(pending.rid, None)
        return True

    def failed(self, key: Key, error: errors.WaybillError, now: float) -> errors.WaybillError | None:
        """Judge an error: None if the request will be asked again, else the request is over and the error stands."""
        pending = self._pending[key]
        again = isinstance(error, errors.Unavailable | errors.TimedOut | errors.RateLimited) or (
            isinstance(error, errors.Internal) and pending.attempts < INTERNAL_ATTEMPTS
        )
        if not again:
            self.answered(key)
            return error
        if pending.rid is not None:
            self._waiting.pop(pending.rid, None)
        pending.rid = None
        ceiling = min(RETRY_CAP_S, RETRY_BASE_S * 2.0 ** min(pending.attempts, 16))
        wait = ceiling * self._random()
        if error.retry_after_ms is not None:
            # Chance comes on top: clients that were refused together must not come back together.
            wait = error.retry_after_ms / 1000 + wait
        if isinstance(error, errors.RateLimited) and key[0] == "send":
            self.pace.refused(now, wait)
            self._ready(pending, now)
            return None
        self._number += 1
        pending.ticket = self._number
        heapq.heappush(self._later, (now + wait, pending.ticket, key))
        return None

    def due(self, now: float) -> list[bytes]:
        """Return the frames of what is to be asked again by ``now``."""
        frames: list[bytes] = []
        while self._later and self._later[0][0] <= now:
            _, ticket, key = heapq.heappop(self._later)
            pending = self._pending.get(key)
            if pending is not None and pending.ticket == ticket:
                frames += self._ready(pending, now)
        while self._waiting:
            # All attempts wait equally long, so the first in is the first due.
            pending, until = next(iter(self._waiting.values()))
            if until > now:
                break
            frames.append(self._attempt(pending, now))
        return frames + self._leaving(now)

    def next_at(self) -> float | None:
        """Return when ``due`` has something to say next, None if never."""
        times = [self._later[0][0]] if self._later else []
        if self._waiting:
            times.append(next(iter(self._waiting.values()))[1])
        if self._queue and len(self._waiting) < MAX_IN_FLIGHT:
            times.append(self.pace.next_at())
        return min(times, default=None)

    def _ready(self, pending: Pending, now: float) -> list[bytes]:
        """Put a send into the queue; return the frame of anything else, which leaves at once."""
        pending.ticket = 0
        if pending.key[0] != "send":
            return [self._attempt(pending, now)]
        if not pending.queued:
            pending.queued = True
            heapq.heappush(self._queue, (pending.number, pending.key))
        return []

    def _leaving(self, now: float) -> list[bytes]:
        """Return the frames of queued sends that may leave now, the oldest first."""
        frames: list[bytes] = []
        while self._queue and len(self._waiting) < MAX_IN_FLIGHT and self.pace.next_at() <= now:
            number, key = heapq.heappop(self._queue)
            pending = self._pending.get(key)
            if pending is not None and pending.number == number:
                self.pace.left(now)
                pending.queued = False
                frames.append(self._attempt(pending, now))
        if not self._queue:
            self.pace.drained()
        return frames

    def _blocked(self, pending: Pending) -> bool:
        if not pending.strict:
            return False
        return next(iter(self._order[pending.key[1]].values())) is not pending

    def _attempt(self, pending: Pending, now: float) -> bytes:
        if pending.rid is not None:
            self._waiting.pop(pending.rid, None)
        if pending.attempts:
            self._stats.resends += 1
        self._number += 1
        rid = pending.rid = f"r{self._number}"
        pending.attempts += 1
        pending.ticket = 0
        self._waiting[rid] = (pending, now + self._answer_timeout_s)
        return b'{"t":"%b","rid":"%b",%b' % (pending.key[0].encode(), rid.encode(), pending.fields)


def send_fields(
    conversation_id: str, client_msg_id: str, type_: str, body: bytes | None, target_seq: int | None
) -> bytes:
    """Return the ``fields`` of a send; ``body`` goes in as the bytes it is, so that its numbers keep their digits."""
    head = {"conversation_id": conversation_id, "client_msg_id": client_msg_id, "type": type_}
    fields = encode(head if target_seq is None else {**head, "target_seq": target_seq})[1:]
    return fields if body is None else b'%b,"body":%b}' % (fields[:-1], body)
