"""`GET /v1/conversations/{id}/events/{seq}/history`: what an event has said before it was edited (protocol §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Protocol

from fastapi import FastAPI, Path, Request, Response

from services.ingest import asking, schemas
from services.ingest.admission import reader
from shared.contracts.words import MAX_SEQ

if TYPE_CHECKING:
    from services.ingest.history import History
    from shared.auth import Verifier


class ReadsHistory(Protocol):
    """`services.ingest.history.history` with its pool and setting."""

    async def __call__(
        self, conversation_id: str, user_id: str | None, /, *, seq: int, after: int = 0, limit: int = 100
    ) -> History:
        """Versions of an event."""
        ...


class Behind(Protocol):
    """What stands behind it."""

    @property
    def verifier(self) -> Verifier:
        """Of tokens."""

    @property
    def history(self) -> ReadsHistory:
        """Reads versions of an event."""


def add(app: FastAPI, door: Behind, failures: dict[int | str, dict[str, Any]]) -> None:
    """Add the route. ``failures``: how its errors are described."""

    @app.get(
        "/v1/conversations/{conversation_id}/events/{seq}/history",
        summary="What an event has said before it was edited",
        responses={200: {"model": schemas.History}, **failures},
        openapi_extra={
            "parameters": [
                {"name": name, "in": "query", "description": what, "schema": {"type": "integer"}}
                for name, what in (
                    ("after", "Versions with a seq above this one: the last answer's `next`."),
                    ("limit", "At most so many, 1 to 500; 100 if not said."),
                )
            ]
        },
    )
    async def history(
        conversation_id: str, seq: Annotated[str, Path(json_schema_extra={"type": "integer"})], request: Request
    ) -> Response:
        user_id = reader(await asking.claims(door.verifier, request))
        found = asking.conversation(conversation_id)
        query = request.query_params
        told = await door.history(
            found,
            user_id,
            seq=asking.number({"seq": seq}, "seq", low=1, high=MAX_SEQ),
            after=asking.number(query, "after", low=0, high=MAX_SEQ) if "after" in query else 0,
            limit=asking.limit(query),
        )
        return asking.answer(told)
