"""`GET /v1/conversations/{id}/receipts`: who has a seq (protocol §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, get_args

from fastapi import FastAPI, Request, Response  # noqa: TC002 - FastAPI reads annotations

from services.ingest import asking, schemas
from services.ingest.admission import reader
from shared.contracts.words import MAX_SEQ, State, is_name
from shared.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.auth import Verifier
    from shared.readers import Readers

_STATES = get_args(State)


class Reads(Protocol):
    """`shared.readers.readers` with its pool."""

    async def __call__(
        self,
        conversation_id: str,
        user_id: str | None,
        /,
        *,
        seq: int,
        state: State = "read",
        after: str | None = None,
        limit: int = 100,
    ) -> Readers:
        """Who has a seq."""
        ...


class Behind(Protocol):
    """What stands behind it."""

    @property
    def verifier(self) -> Verifier:
        """Of tokens."""

    @property
    def readers(self) -> Reads:
        """Reads who has a seq."""


def add(app: FastAPI, door: Behind, failures: dict[int | str, dict[str, Any]]) -> None:
    """Add the route. ``failures``: how its errors are described."""

    @app.get(
        "/v1/conversations/{conversation_id}/receipts",
        summary="Who has received and read an event",
        responses={200: {"model": schemas.Receipts}, **failures},
        openapi_extra={
            "parameters": [
                {"name": name, "in": "query", "required": required, "description": what, "schema": schema}
                for name, required, what, schema in (
                    ("seq", True, "Of the event.", {"type": "integer"}),
                    (
                        "state",
                        False,
                        "Whose names: who has read it (if not said), who holds it, who has not read it.",
                        {"type": "string", "enum": list(_STATES)},
                    ),
                    ("after", False, "Users above this id: the last answer's `next`.", {"type": "string"}),
                    ("limit", False, "At most so many, 1 to 500; 100 if not said.", {"type": "integer"}),
                )
            ]
        },
    )
    async def receipts(conversation_id: str, request: Request) -> Response:
        user_id = reader(await asking.claims(door.verifier, request))
        found = asking.conversation(conversation_id)
        query = request.query_params
        told = await door.readers(
            found,
            user_id,
            seq=_seq(query),
            state=_state(query.get("state", "read")),
            after=_after(query.get("after")),
            limit=asking.limit(query),
        )
        return asking.answer(told)


def _seq(query: Mapping[str, str]) -> int:
    if "seq" not in query:
        raise BadRequestError("seq is needed", field="seq")
    return asking.number(query, "seq", low=1, high=MAX_SEQ)


def _state(text: str) -> State:
    if text not in _STATES:
        raise BadRequestError(f"expected one of {', '.join(_STATES)}", field="state")
    return cast("State", text)


def _after(text: str | None) -> str | None:
    if text is not None and not is_name(text):
        raise BadRequestError("expected a user id", field="after")
    return text
