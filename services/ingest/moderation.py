"""The hook that judges messages and edits before they are written (protocol §6, §9)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, Protocol

import aiohttp
import msgspec

from services.ingest.metrics import MODERATION
from shared.errors import ModeratedError, UnavailableError, WaybillError
from shared.logging import logger

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from services.ingest.admission import Send
    from services.ingest.writer import Answer

JUDGED = ("message", "edit")

_MAX_ANSWER_BYTES = 1024 * 1024
_MAX_REASON = 500

log = logger(__name__)


class Verdict(msgspec.Struct, frozen=True):
    """What the hook says of one item."""

    allow: bool
    reason: str | None = None


class _Verdicts(msgspec.Struct, frozen=True):
    results: list[Verdict]


class _Question(msgspec.Struct, frozen=True):
    conversation_id: str
    sender_id: str
    type: str
    body: msgspec.Raw
    client_msg_id: str


_DECODER = msgspec.json.Decoder(_Verdicts)
_ENCODER = msgspec.json.Encoder()


class HookAwayError(Exception):
    """No answer in time, or none that can be used."""


class Judge(Protocol):
    """Whoever judges."""

    async def verdicts(self, sends: Sequence[Send]) -> list[Verdict]:
        """A verdict for each, in order. Raises `HookAwayError`."""
        ...


class Hook:
    """The hook over HTTP. ``timeout_s`` bounds the whole call."""

    def __init__(self, session: aiohttp.ClientSession, url: str, timeout_s: float) -> None:
        self._session = session
        self._url = url
        self._timeout_s = timeout_s

    async def verdicts(self, sends: Sequence[Send]) -> list[Verdict]:
        """A verdict for each, in order. Raises `HookAwayError`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                results = _DECODER.decode(await self._ask(question(sends))).results
        except (
            OSError,
            TimeoutError,
            aiohttp.ClientError,
            msgspec.MsgspecError,
            UnicodeError,
            RecursionError,
        ) as error:
            raise HookAwayError(type(error).__name__) from error
        if len(results) != len(sends):
            raise HookAwayError("another number of results than of items")
        return results

    async def _ask(self, body: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer:
            if answer.status != 200:
                raise HookAwayError(f"status {answer.status}")
            read = bytearray()
            async for chunk in answer.content.iter_chunked(64 * 1024):
                read += chunk
                if len(read) > _MAX_ANSWER_BYTES:
                    raise HookAwayError("the answer is too long")
            return bytes(read)


def question(sends: Sequence[Send]) -> bytes:
    """The body of the hook's request; each event's body as its sender wrote it."""
    items = [
        _Question(
            send.draft.conversation_id,
            send.draft.sender_id,
            send.draft.type,
            msgspec.Raw(b"null" if send.draft.body is None else send.draft.body.text.encode()),
            send.draft.client_msg_id,
        )
        for send in sends
    ]
    return _ENCODER.encode({"items": items})


class Store(Protocol):
    """The writer, as moderation needs it."""

    async def write(self, sends: Sequence[Send], moderated: Collection[int] = ()) -> list[Answer]:
        """Write a batch, but what is refused already, by place."""
        ...

    async def would_pass(self, sends: Sequence[Send]) -> list[bool]:
        """Which would be written as new."""
        ...


class Moderated:
    """A writer that asks first. Outside any transaction, and only about what would be written as new."""

    def __init__(self, writer: Store, judge: Judge, when_away: Literal["open", "closed"]) -> None:
        self._writer = writer
        self._judge = judge
        self._open = when_away == "open"

    async def write(self, sends: Sequence[Send]) -> list[Answer]:
        """Write what is allowed; `ModeratedError` for the rest, which the store notes. Raises as the writer does."""
        refused = await self._refused(sends)
        judged = {at for at, error in refused.items() if isinstance(error, ModeratedError)}
        told = [at for at in range(len(sends)) if at not in refused or at in judged]
        moderated = {place for place, at in enumerate(told) if at in judged}
        written = await self._writer.write([sends[at] for at in told], moderated) if told else []
        answers: dict[int, Answer] = dict(zip(told, written, strict=True))
        # The reason is the hook's to tell, unless the store had a better one by then.
        stand = {at: error for at, error in refused.items() if isinstance(answers.get(at, error), type(error))}
        return [(answers | stand)[at] for at in range(len(sends))]

    async def _refused(self, sends: Sequence[Send]) -> dict[int, WaybillError]:
        """Errors by place in the batch.

        A copy of a client id that is allowed earlier in the batch is left to the store, which knows it by then.
        """
        if not any(send.draft.type in JUDGED for send in sends):
            return {}
        passing = await self._writer.would_pass(sends)
        asked = [at for at, send in enumerate(sends) if passing[at] and send.draft.type in JUDGED]
        if not asked:
            return {}
        try:
            verdicts = await self._judge.verdicts([sends[at] for at in asked])
            MODERATION.labels("answered").inc()
        except HookAwayError as error:
            MODERATION.labels("away").inc()
            log.warning("the moderation hook is away", error=str(error), writes=self._open)
            verdicts = [Verdict(allow=True)] * len(asked) if self._open else []
        refused: dict[int, WaybillError] = {}
        known: set[tuple[str, str, str]] = set()
        for place, at in enumerate(asked):
            draft = sends[at].draft
            key = (draft.conversation_id, draft.sender_id, draft.client_msg_id)
            if key in known:
                continue
            if not verdicts:
                refused[at] = UnavailableError("moderation is away", retry_after_ms=1000)
            elif verdicts[place].allow:
                known.add(key)
            else:
                refused[at] = ModeratedError((verdicts[place].reason or "refused by moderation")[:_MAX_REASON])
        return refused
