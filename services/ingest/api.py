"""Ingest's HTTP door (protocol §6)."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

import msgspec
from fastapi import FastAPI, Request, Response

from services.ingest import asking, history_api, own_api, receipts_api, schemas
from services.ingest.admission import Send, admit, creator, reader
from services.ingest.conversations import CreateRequest, plan
from services.ingest.items import item, items
from services.ingest.metrics import SENDS
from services.ingest.openapi import describe, takes
from shared import problems
from shared.bodies import read_body
from shared.contracts.decode import decode
from shared.contracts.words import MAX_SEQ
from shared.errors import BadRequestError, WaybillError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.ingest.conversations import Conversations
    from services.ingest.history_api import ReadsHistory
    from services.ingest.lanes import Lanes
    from services.ingest.own_api import ReadsUnread, SetsSettings
    from services.ingest.receipts_api import Reads
    from services.ingest.writer import Answer
    from shared.auth import Claims, Verifier
    from shared.timeline import Page

_JSON = "application/json"
_READ_S = 30.0
_SLICE_BYTES = 256 * 1024
"""So many bytes of bodies are parsed at a time before other requests get their turn."""

_CREATE = msgspec.json.Decoder(CreateRequest)


class _Asked(TypedDict):
    limit: int
    after: NotRequired[int]
    before: NotRequired[int]


class Pages(Protocol):
    """`shared.timeline.page` with its pool."""

    async def __call__(
        self,
        conversation_id: str,
        user_id: str | None,
        /,
        *,
        limit: int,
        after: int | None = None,
        before: int | None = None,
    ) -> Page:
        """A page of what a user may see."""
        ...


@dataclass(frozen=True, slots=True)
class Door:
    """What stands behind the API. ``max_body``: bytes of an event's body; ``max_request``: of an HTTP body."""

    verifier: Verifier
    lanes: Lanes
    conversations: Conversations
    pages: Pages
    readers: Reads
    history: ReadsHistory
    set_settings: SetsSettings
    unread: ReadsUnread
    digest_key: bytes
    max_body: int
    max_request: int


def public_app(door: Door) -> FastAPI:
    """The public port."""
    app = FastAPI(title="Waybill ingest", version="1", redoc_url=None)
    problems.install(app)
    failures: dict[int | str, dict[str, Any]] = {"default": {"model": schemas.HttpProblem, "description": "A problem"}}

    @app.post(
        "/v1/events",
        summary="Write events",
        responses={200: {"model": schemas.Results}, **failures},
        openapi_extra=takes(schemas.Sends),
    )
    async def write(request: Request) -> Response:
        claims = await asking.claims(door.verifier, request)
        texts = items(await read_body(request, door.max_request, within_s=_READ_S))
        answers = await _write(door, claims, texts, asking.traceparent(request))
        return asking.answer({"results": [_result(answer) for answer in answers]})

    @app.post(
        "/v1/conversations",
        summary="Make a conversation",
        status_code=201,
        responses={200: {"model": schemas.Created}, 201: {"model": schemas.Created}, **failures},
        openapi_extra=takes(schemas.Create),
    )
    async def create(request: Request) -> Response:
        claims = await asking.claims(door.verifier, request)
        asked = decode(_CREATE, await read_body(request, door.max_request, within_s=_READ_S), fallback="members")
        planned = plan(asked, creator(claims, asked.creator_id))
        existing = await door.conversations.create(planned)
        told = {"conversation_id": planned.conversation_id, "existing": existing}
        return asking.answer(told, status=200 if existing else 201)

    @app.get(
        "/v1/conversations/{conversation_id}",
        summary="What a conversation is now",
        responses={200: {"model": schemas.Conversation}, **failures},
    )
    async def state(conversation_id: str, request: Request) -> Response:
        claims = await asking.claims(door.verifier, request)
        return asking.answer(await door.conversations.state(asking.conversation(conversation_id), reader(claims)))

    @app.get(
        "/v1/conversations/{conversation_id}/events",
        summary="A page of the timeline",
        responses={200: {"model": schemas.Page}, **failures},
        openapi_extra={
            "parameters": [
                {"name": name, "in": "query", "description": what, "schema": {"type": "integer"}}
                for name, what in (
                    ("after", "Events above this seq. Exactly one of after, before."),
                    ("before", "Events below this seq."),
                    ("limit", "At most so many, 1 to 500; 100 if not said."),
                )
            ]
        },
    )
    async def page(conversation_id: str, request: Request) -> Response:
        claims = await asking.claims(door.verifier, request)
        found = asking.conversation(conversation_id)
        asked = _asked(request.query_params)
        return Response((await door.pages(found, reader(claims), **asked)).encode(), media_type=_JSON)

    receipts_api.add(app, door, failures)
    history_api.add(app, door, failures)
    own_api.add(app, door, failures)
    describe(app)
    return app


async def _write(door: Door, claims: Claims, texts: Sequence[bytes], traceparent: str | None) -> list[Answer]:
    answers: list[Answer | None] = []
    sends: list[Send] = []
    unparsed = 0
    for text in texts:
        unparsed += len(text)
        if unparsed > _SLICE_BYTES:
            unparsed = 0
            await asyncio.sleep(0)
        try:
            sends.append(
                admit(claims, item(text), digest_key=door.digest_key, max_body=door.max_body, traceparent=traceparent)
            )
            answers.append(None)
        except WaybillError as error:
            answers.append(error)
    try:
        written = iter(await door.lanes.send(sends))
    except WaybillError as error:
        SENDS.labels(error.code).inc(len(sends))
        raise
    done = [next(written) if answer is None else answer for answer in answers]
    for result, count in Counter(map(_name, done)).items():
        SENDS.labels(result).inc(count)
    return done


def _name(answer: Answer) -> str:
    if isinstance(answer, WaybillError):
        return answer.code
    return "duplicate" if answer.duplicate else "new"


def _result(answer: Answer) -> dict[str, object]:
    if isinstance(answer, WaybillError):
        return {"status": answer.status, "error": answer.as_dict()}
    return {"status": 200 if answer.duplicate else 201, "event": answer}


def _asked(query: Mapping[str, str]) -> _Asked:
    if ("after" in query) == ("before" in query):
        raise BadRequestError("exactly one of after, before", field="after")
    asked: _Asked = {"limit": asking.limit(query)}
    if "after" in query:
        asked["after"] = asking.number(query, "after", low=0, high=MAX_SEQ)
    else:
        asked["before"] = asking.number(query, "before", low=1, high=MAX_SEQ)
    return asked
