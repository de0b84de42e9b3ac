"""What a stalled client costs the gateway: the same flood with such clients in the conversation, and without."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import aiohttp

from bench.cells import Cell, added, added_kib, errors
from bench.stalled import stalled, unsent_bytes
from shared.auth import mint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bench.cells import Answer, Errors
    from bench.centrifugo import Programs, Target
    from bench.figures import Figures
    from bench.gateway_services import Gateway, Services

READERS, STALLED = 200, 50
"""Members that read, and members that do not."""

LEAST_MIB = 20.0
"""What a flood has to bring to each member."""

TEXT = 2_000
"""Characters of a message, so that the flood is over before the gateway gives silent clients up."""

_AHEAD = 20
_SECONDS = 20.0
_SESSIONS = "waybill_sessions"
_TIMEOUT_S = 30.0
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Flood:
    """How one flood went. ``grown_kib``: the gateway's memory at its end less that at its start, with nobody there.

    ``open_after``: how many of the clients that do not read still have their session at the end; ``unsent_kib``: what
    the kernel holds of theirs.
    """

    answer: Answer
    grown_kib: float
    open_after: int
    unsent_kib: float


async def flood(
    gateway: Gateway, target: Target, programs: Programs, services: Services, *, silent: int, scale: float, folder: Path
) -> Flood:
    """Flood a conversation of readers and ``silent`` clients that do not read. Raises `RuntimeError`, `OSError`."""
    before = gateway.rss_kib()
    readers = max(2, round(READERS * scale))
    users = [f"stalled-{number}" for number in range(silent)]
    conversation = await _make(services, [*(f"u{number:06}" for number in range(readers)), *users])
    seqs = folder / "stalled.seqs"
    seqs.write_text(f"{conversation} 1\n", encoding="utf-8")
    more = ("-seq-file", str(seqs), "-text", str(TEXT), "-outstanding", str(_AHEAD))
    flags = Cell("flood", 1, readers, more=more).flags(_SECONDS)
    tokens = {user: mint(services.secret, user) for user in users}
    with contextlib.ExitStack() as closing:
        clients = await asyncio.to_thread(lambda: closing.enter_context(stalled(gateway.socket, tokens)))
        answer = await programs.load(f"stalled-{silent}", target, flags)
        await asyncio.sleep(_SETTLE_S)
        unsent = unsent_bytes(clients) / 1024
        open_after = int(await gateway.metric(_SESSIONS))
    return Flood(answer, float(str(answer["server_rss_kib_after"])) - before, open_after, unsent)


def compared(without: Flood, with_them: Flood, silent: int) -> tuple[Figures, Figures, Errors]:
    """What a client that does not read adds, how the floods went, and what went wrong in either.

    A flood that is too small to say anything, and clients that were sent away meanwhile, are errors too.
    """
    brought = mib(with_them.answer)
    figures = {
        "stalled_kib": added_kib(with_them.grown_kib, without.grown_kib, silent),
        "stalled_kernel_kib": round(with_them.unsent_kib / silent, 1),
    }
    details = {
        "stalled_grown_kib": with_them.grown_kib,
        "stalled_grown_kib_without": without.grown_kib,
        "stalled_mib_each": round(brought, 1),
    }
    unlike = {"mib_too_few": math.ceil(LEAST_MIB - brought), "sent_away": silent - with_them.open_after}
    own = {name: count for name, count in unlike.items() if count > 0}
    return figures, details, added(added(errors(without.answer), errors(with_them.answer)), own)


def mib(answer: Mapping[str, object]) -> float:
    """MiB of frames that a flood brought to each of its receivers in the measured time."""
    return float(str(answer["published"])) * float(str(answer["frame_bytes"])) / 2**20


async def _make(services: Services, members: list[str]) -> str:
    """A group. Raises `RuntimeError` if it is refused."""
    asked = {"kind": "group", "conversation_id": str(uuid4()), "creator_id": members[0], "members": members}
    headers = {"Authorization": f"Bearer {mint(services.secret, 'bench', scope='service')}"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
        http.post(f"{services.ingest}/v1/conversations", json=asked) as answer,
    ):
        if answer.status not in (200, 201):
            raise RuntimeError(f"no conversation: {await answer.text()}")
    return str(asked["conversation_id"])
