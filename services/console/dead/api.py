"""Dead letters over HTTP, for admins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from services.console.answers import answers, body, reply, takes
from services.console.dead.changes import discard, retry
from services.console.dead.letters import MAX_LIMIT, page, show
from services.console.dead.schemas import Change, Changes, Detail, Filter, Ids, Page, Reason, State, only
from shared.contracts.words import MAX_SEQ

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.postgres import Pool

KINDS = (Page, Detail, Change, Changes, Ids, Reason)
"""What OpenAPI has to be told of."""

_IDS = msgspec.json.Decoder(Ids)
_REASON = msgspec.json.Decoder(Reason)

_Id = Annotated[int, Path(ge=1, le=MAX_SEQ)]


def router(pool: Pool, who: Callable[[Request], str]) -> APIRouter:
    """The routes. ``who`` tells the caller's name."""
    routes = APIRouter(prefix="/api/dead", tags=["dead letters"])

    @routes.get("", summary="A page of dead letters", responses=answers(Page))
    async def listed(
        *,
        state: Annotated[list[State] | None, Query(description="May be said several times.")] = None,
        conversation: str | None = None,
        event: str | None = None,
        shard: Annotated[int | None, Query(ge=0, le=63)] = None,
        origin: Annotated[str | None, Query(description="`outbox`, or the topic that a consumer read it from.")] = None,
        order: Annotated[Literal["newest", "oldest"], Query(description="Which one comes first.")] = "newest",
        after: Annotated[str | None, Query(description="The `next` of the page before.")] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 50,
    ) -> Response:
        wanted = Filter(tuple(state or ()), conversation, event, shard, origin)
        return reply(await page(pool, wanted, newest=order == "newest", after=after, limit=limit))

    @routes.post("/retry", summary="Try letters again", responses=answers(Changes), openapi_extra=takes(Ids))
    async def retried(request: Request) -> Response:
        asked = await body(request, _IDS, fallback="ids")
        return reply(Changes(await retry(pool, asked.ids, who(request))))

    @routes.get("/{dead_id}", summary="A letter with all that is known of it", responses=answers(Detail))
    async def shown(dead_id: Annotated[str, Path(description="Or an event's id: its newest letter.")]) -> Response:
        return reply(await show(pool, dead_id))

    @routes.post("/{dead_id}/retry", summary="Try a letter again", responses=answers(Change))
    async def retried_one(dead_id: _Id, request: Request) -> Response:
        return reply(only(await retry(pool, [dead_id], who(request))))

    @routes.post(
        "/{dead_id}/discard", summary="Give a letter up", responses=answers(Change), openapi_extra=takes(Reason)
    )
    async def discarded(dead_id: _Id, request: Request) -> Response:
        asked = await body(request, _REASON, fallback="reason")
        return reply(only(await discard(pool, [dead_id], asked.reason, who(request))))

    return routes
