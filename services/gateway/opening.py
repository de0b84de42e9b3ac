"""Session numbers: each `hello` counts its device up in Postgres, so that of two sessions the newer one is known.

Hellos are gathered for a moment: when thousands of clients come back at once, a statement each would be the whole cost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from services.gateway.revocations import Revocation, revocation
from shared.errors import InternalError, UnavailableError
from shared.logging import logger
from shared.metrics import LOOP_ERRORS
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.auth import Claims
    from shared.errors import WaybillError
    from shared.postgres import Pool, Record

_OPEN = statements(__file__)["open_sessions"]
_LOOP = LOOP_ERRORS.labels("opening")
_BATCH_S = 8.0


class Opened(NamedTuple):
    """``number``: the session's; None if the token is void, then nothing was counted. ``revocations``: the user's."""

    number: int | None
    revocations: tuple[Revocation, ...]


class _Hello(NamedTuple):
    user_id: str
    device_id: str
    session_id: str
    claims: Claims
    opened: asyncio.Future[Opened]


class Opener:
    """Counts hellos, at most ``most`` to a statement and ``at_once`` statements at a time.

    ``gather_s``: how long the first of a batch waits for others. ``most_waiting``: more are refused.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        gateway: str,
        gather_s: float = 0.008,
        most: int = 200,
        at_once: int = 2,
        most_waiting: int = 20_000,
    ) -> None:
        self._pool = pool
        self._gateway = gateway
        self._gather_s = gather_s
        self._most = most
        self._most_waiting = most_waiting
        self._turns = asyncio.Semaphore(at_once)
        self._waiting: list[_Hello] = []
        self._some = asyncio.Event()
        self._enough = asyncio.Event()
        self._stopped = False

    async def open(self, user_id: str, device_id: str, session_id: str, claims: Claims) -> Opened:
        """Raise the device's number for this session, unless the token is void. Needs `run`.

        ``session_id``: a UUID. Raises `UnavailableError` when Postgres is away or too many wait.
        """
        if self._stopped or len(self._waiting) >= self._most_waiting:
            raise UnavailableError("too many hellos wait, or the gateway stops", retry_after_ms=1000)
        opened: asyncio.Future[Opened] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Hello(user_id, device_id, session_id, claims, opened))
        self._some.set()
        if len(self._waiting) >= self._most:
            self._enough.set()
        return await opened

    async def run(self) -> None:
        """Open what waits, until cancelled; who waits then is told that it cannot be done now."""
        try:
            async with asyncio.TaskGroup() as batches:
                while True:
                    await self._some.wait()
                    await self._gather()
                    await self._turns.acquire()
                    batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                    if not self._waiting:
                        self._some.clear()
                    batches.create_task(self._batch(batch), name="opening")
        finally:
            self._stopped = True
            _fail(self._waiting, UnavailableError, "the gateway stops")

    async def _gather(self) -> None:
        if len(self._waiting) >= self._most:
            return
        self._enough.clear()
        try:
            async with asyncio.timeout(self._gather_s):
                await self._enough.wait()
        except TimeoutError:
            pass

    async def _batch(self, batch: Sequence[_Hello]) -> None:
        hellos = [hello for hello in batch if not hello.opened.done()]
        try:
            if hellos:
                await self._open(hellos)
        except UnavailableError as error:
            _LOOP.inc()
            _fail(hellos, UnavailableError, error.message)
        except asyncpg.PostgresError:
            # Not the end of all other sessions; the waiting ones are told that it is our fault.
            _LOOP.inc()
            logger(__name__).exception("sessions could not be opened")
            _fail(hellos, InternalError, "the session could not be opened")
        finally:
            self._turns.release()
            _fail(hellos, UnavailableError, "the gateway stops")

    async def _open(self, hellos: Sequence[_Hello]) -> None:
        with unavailable_if_away():
            async with asyncio.timeout(_BATCH_S):
                rows = await self._pool.fetch(
                    _OPEN,
                    [hello.user_id for hello in hellos],
                    [hello.device_id for hello in hellos],
                    [hello.session_id for hello in hellos],
                    self._gateway,
                    [hello.claims.issued_at for hello in hellos],
                    [hello.claims.token_id for hello in hellos],
                )
        numbers, revocations = _sorted_out(rows)
        for place, hello in enumerate(hellos, 1):
            if not hello.opened.done():
                hello.opened.set_result(Opened(numbers.get(place), tuple(revocations.get(hello.user_id, ()))))


def _sorted_out(rows: Sequence[Record]) -> tuple[dict[int, int], dict[str, list[Revocation]]]:
    """Numbers by ordinal, and revocations by user."""
    numbers: dict[int, int] = {}
    revocations: dict[str, list[Revocation]] = {}
    for row in rows:
        if row["ord"] is not None:
            numbers[row["ord"]] = row["number"]
        else:
            revocations.setdefault(row["user_id"], []).append(revocation(row))
    return numbers, revocations


def _fail(hellos: Sequence[_Hello], kind: type[WaybillError], message: str) -> None:
    # An error of its own for each: one that is raised in many places collects the traces of all of them.
    for hello in hellos:
        if not hello.opened.done():
            hello.opened.set_exception(kind(message, retry_after_ms=1000))
