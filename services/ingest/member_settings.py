"""A user's own settings of a conversation: muted, archived (protocol §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from shared.contracts import member_settings
from shared.contracts.member_settings import Moment  # noqa: TC001 - msgspec reads annotations
from shared.contracts.words import Name  # noqa: TC001 - msgspec reads annotations
from shared.errors import NotFoundError, TimedOutError
from shared.postgres import unavailable_if_away
from shared.statements import statements

if TYPE_CHECKING:
    from datetime import datetime

    from shared.postgres import Pool

_SET = statements(__file__)["set_settings"]


class SettingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `PUT …/settings`. What is null stays as it is. ``device_id`` is the gateway's to tell."""

    muted: bool | None = None
    muted_until: Moment | None = None
    archived: bool | None = None
    user_id: Name | None = None
    device_id: Name | None = None

    def __post_init__(self) -> None:
        self.until()

    def until(self) -> datetime | None:
        """``muted_until`` in UTC. Raises `BadRequestError` if these do not go together."""
        return member_settings.check(muted=self.muted, muted_until=self.muted_until, archived=self.archived)


class OwnSettings(msgspec.Struct, frozen=True):
    """The answer: how they are now."""

    conversation_id: str
    muted: bool
    muted_until: str | None
    archived: bool


async def set_settings(
    pool: Pool,
    conversation_id: str,
    user_id: str,
    request: SettingsRequest,
    *,
    trace_id: str | None,
    timeout_s: float,
) -> OwnSettings:
    """Set them, or find that they are so.

    Raises `NotFoundError` for who never was a member, as for a conversation that is not there; `UnavailableError` or
    `TimedOutError` if it is not known whether they are set.
    """
    with unavailable_if_away():
        try:
            async with pool.acquire(timeout=timeout_s) as connection:
                row = await connection.fetchrow(
                    _SET,
                    conversation_id,
                    user_id,
                    request.muted,
                    request.until(),
                    request.archived,
                    request.device_id,
                    trace_id,
                    timeout=timeout_s,
                )
        except TimeoutError:
            raise TimedOutError("the store did not answer in time") from None
    if row is None:
        raise NotFoundError("no such conversation", field="conversation_id")
    return OwnSettings(conversation_id, *row)
