"""The relay's shards over HTTP, for admins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import APIRouter, Path, Request, Response

from services.console.answers import answers, body, reply, takes
from services.console.relay.shards import Resumed, Rewind, Rewound, Shards, resume, rewind, shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.postgres import Pool

KINDS = (Shards, Rewind, Rewound, Resumed)
"""What OpenAPI has to be told of."""

_REWIND = msgspec.json.Decoder(Rewind)

_Shard = Annotated[int, Path(ge=0, le=63)]


def router(pool: Pool, who: Callable[[Request], str]) -> APIRouter:
    """The routes. ``who`` tells the caller's name."""
    routes = APIRouter(prefix="/api/relay/shards", tags=["relay"])

    @routes.get("", summary="Every shard of the outbox", responses=answers(Shards))
    async def listed() -> Response:
        return reply(await shards(pool))

    @routes.post("/{shard}/resume", summary="Let a stopped shard go on", responses=answers(Resumed))
    async def resumed(shard: _Shard, request: Request) -> Response:
        return reply(await resume(pool, shard, who(request)))

    @routes.post(
        "/{shard}/rewind",
        summary="Publish a shard again from an id on",
        responses=answers(Rewound),
        openapi_extra=takes(Rewind),
    )
    async def rewound(shard: _Shard, request: Request) -> Response:
        asked = await body(request, _REWIND, fallback="id")
        return reply(await rewind(pool, shard, asked.id, who(request)))

    return routes
