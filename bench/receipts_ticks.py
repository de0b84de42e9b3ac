"""From the `ack` frame at one member's socket to the `receipt` frame at the other's, at an even rate.

Both sides have the same gateway, the same sockets and the same broker. Between the gateway's record of an ack and the
record of the receipt stand Waybill's receipts, outbox and relay, or the reference: it upserts and writes the receipt
straight to Kafka.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

from bench.figures import Figures, Turn
from bench.loads import open_loop
from bench.messages import LINES, pairs
from bench.receipts_drain import plain
from bench.receipts_services import OURS, THEIRS
from bench.reference import plain_acks
from bench.sockets import open_sockets
from bench.stage import make_chats
from bench.waits import until
from shared.auth import mint

if TYPE_CHECKING:
    from pathlib import Path

    from bench.messages import Chat
    from bench.receipts_services import Services
    from bench.sockets import Frame
    from deploy.local.stack import Stack

_USERS, _CHATS = 20, 50
_WARM_S = 3.0
_ARRIVE_S = 20.0
_TOKEN_S = 3600.0


@dataclass(slots=True)
class Ticks:
    """Acks under way, by conversation and user: the seq and the time at which its frame was written."""

    waiting: dict[tuple[str, str], list[tuple[int, float]]] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    measured_from: float = 0.0
    """Acks written before that do not count."""

    @property
    def none_waits(self) -> bool:
        """Whether all have been heard of."""
        return not any(self.waiting.values())

    def sent(self, conversation_id: str, user: str, seq: int, at: float) -> None:
        """An ack was written."""
        self.waiting.setdefault((conversation_id, user), []).append((seq, at))

    def heard(self, conversation_id: str, user: str, delivered_seq: int, at: float) -> None:
        """The other one was told of this mark."""
        acks = self.waiting.get((conversation_id, user), [])
        while acks and acks[0][0] <= delivered_seq:
            _, before = acks.pop(0)
            if before >= self.measured_from:
                self.latencies.append(at - before)


class TickBench:
    """``rate_s`` acks a second for ``seconds``, after a warm-up."""

    def __init__(self, stack: Stack, folder: Path, services: Services, *, rate_s: float, seconds: float) -> None:
        self._stack = stack
        self._log = folder / "plain.log"
        self._services = services
        self._rate_s = rate_s
        self._seconds = seconds
        self._turn = 0

    async def waybill(self) -> Figures:
        """Through Waybill. Raises `RuntimeError` if a receipt does not come."""
        chats = await self._chats()
        async with self._services.serving(OURS, ("receipts", "relay", "gateway")) as address:
            await self._services.quiet()
            return await self._measure(address, chats)

    async def peer(self) -> Figures:
        """Through the reference. Raises `RuntimeError` if a receipt does not come."""
        chats = await self._chats()
        await plain_acks.make(self._stack.postgres_url)
        options = ["--postgres", self._stack.postgres_url, "--kafka", self._stack.kafka, "--group", "bench-plain-ticks"]
        options += ["--topic", THEIRS.acks, "--publish", THEIRS.receipts]
        async with self._services.serving(THEIRS, ("gateway",)) as address, plain(options, self._log):
            return await self._measure(address, chats)

    async def _chats(self) -> list[Chat]:
        self._turn += 1
        per_user = round(self._rate_s * (_WARM_S + self._seconds) / _CHATS / 2) + 1
        chats = await make_chats(self._services, pairs(_USERS, _CHATS, f"ticks-{os.getpid()}-{self._turn}"))
        events = [
            {
                "conversation_id": chat.conversation_id,
                "sender_id": chat.users[number % 2],
                "client_msg_id": str(uuid4()),
                "body": {"text": LINES[number % len(LINES)]},
            }
            for number in range(per_user)
            for chat in chats
        ]
        async with self._services.door() as http:
            await self._services.write(http, events)
        return chats

    async def _measure(self, address: str, chats: list[Chat]) -> Figures:
        ticks = Ticks()

        def heard(user: str, frame: Frame, at: float) -> None:
            if frame.t == "receipt" and frame.user_id != user:
                ticks.heard(frame.conversation_id, frame.user_id, frame.delivered_seq, at)

        users = sorted({user for chat in chats for user in chat.users})
        tokens = {user: mint(self._services.auth_secret, user, ttl_s=_TOKEN_S) for user in users}
        async with open_sockets(address, tokens, heard) as sockets:

            async def call(number: int, counts: bool) -> None:  # noqa: FBT001 - the loop's own call
                chat = chats[number % len(chats)]
                turn = number // len(chats)
                user, seq = chat.users[turn % 2], 1 + turn // 2
                if counts and not ticks.measured_from:
                    ticks.measured_from = time.perf_counter()
                ticks.sent(chat.conversation_id, user, seq, time.perf_counter())
                await sockets[user].hold(chat.conversation_id, seq, seq)

            used, began = self._services.cpu_s(), time.perf_counter()
            late = await open_loop(call, rate_s=self._rate_s, warm_s=_WARM_S, measure_s=self._seconds)
            seconds = time.perf_counter() - began
            cores = {f"{of}_cores": round((now - used[of]) / seconds, 2) for of, now in self._services.cpu_s().items()}
            await until(lambda: ticks.none_waits, within_s=_ARRIVE_S, what="a receipt of every ack")
        return {**Turn(ticks.latencies).figures(), "started_late_p99_ms": round(late * 1000, 2), **cores}
