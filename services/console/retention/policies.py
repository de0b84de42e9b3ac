"""Policies of retention in Postgres."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import asyncpg
import msgspec
from msgspec import Meta

from services.console.retention.ages import LEAST_S, MOST_S
from shared.clock import wire_time
from shared.contracts.words import UUID
from shared.errors import BadRequestError, NotFoundError
from shared.logging import logger
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from shared.postgres import Pool

_SQL = statements(__file__)
_POLICIES, _ROUND, _SET, _CLEAR = _SQL["policies"], _SQL["round"], _SQL["set"], _SQL["clear"]

_TIMEOUT_S = 10.0
_MAX_WHO = 200
_MOST = 10_000
_UUID = re.compile(UUID)

log = logger(__name__)


class Policy(msgspec.Struct, frozen=True):
    """Bodies of a conversation, or of all that have no policy of their own, are erased at an age."""

    conversation_id: Annotated[str | None, Meta(description="null: of all that have none of their own.")]
    age_s: Annotated[float | None, Meta(description="null: bodies are kept.")]
    set_by: str
    set_at: str


class Policies(msgspec.Struct, frozen=True):
    """All of them, and the round through all conversations that is under way or was the last one."""

    policies: list[Policy]
    is_under_way: bool
    round_begun_at: str | None
    round_ended_at: str | None


async def listing(pool: Pool) -> Policies:
    """Every policy; at most 10,000. Raises `UnavailableError`."""
    with unavailable_if_away():
        rows = await pool.fetch(_POLICIES, _MOST, timeout=_TIMEOUT_S)
        found = await pool.fetchrow(_ROUND, timeout=_TIMEOUT_S)
    made = [Policy(row["conversation_id"], row["age_s"], row["set_by"], wire_time(row["set_at"])) for row in rows]
    if found is None:
        return Policies(made, is_under_way=False, round_begun_at=None, round_ended_at=None)
    begun, ended = (found[name] and wire_time(found[name]) for name in ("begun_at", "ended_at"))
    return Policies(made, found["is_under_way"], begun, ended)


async def set_policy(pool: Pool, conversation_id: str | None, age_s: float | None, who: str) -> bool:
    """Have bodies erased at an age, or kept (None); whether that is news. ``conversation_id`` None: of all without one.

    Raises `BadRequestError` with the field, `NotFoundError`, `UnavailableError`.
    """
    if age_s is not None and not LEAST_S <= age_s <= MOST_S:
        raise BadRequestError("expected an age from a minute to 100 years", field="age")
    by, of = _who(who), _conversation(conversation_id)
    with unavailable_if_away():
        try:
            changed: bool = await pool.fetchval(_SET, of, age_s, by, timeout=_TIMEOUT_S)
        except asyncpg.NoDataFoundError:
            raise NotFoundError("no such conversation", field="conversation_id") from None
    if changed:
        log.info("retention is set", conversation_id=of, age_s=age_s, who=by)
    return changed


async def clear_policy(pool: Pool, conversation_id: str | None, who: str) -> bool:
    """Take a policy away; whether there was one. What it has erased stays erased. Raises as `set_policy`."""
    by, of = _who(who), _conversation(conversation_id)
    with unavailable_if_away():
        changed: bool = await pool.fetchval(_CLEAR, of, by, timeout=_TIMEOUT_S)
    if changed:
        log.info("retention is cleared", conversation_id=of, who=by)
    return changed


def _who(who: str) -> str:
    by = who.strip()
    if not 1 <= len(by) <= _MAX_WHO or "\0" in by:
        raise BadRequestError(f"expected 1 to {_MAX_WHO} characters", field="who")
    return by


def _conversation(text: str | None) -> str | None:
    if text is not None and not _UUID.match(text):
        raise BadRequestError("expected a UUID", field="conversation_id")
    return text and text.lower()
