"""What a user has of conversations for itself: `PUT …/settings` and `GET /v1/unread` (protocol §6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from fastapi import FastAPI, Request, Response  # noqa: TC002 - FastAPI reads annotations

from services.ingest import asking, schemas
from services.ingest.admission import own
from services.ingest.member_settings import SettingsRequest
from services.ingest.openapi import takes
from shared.bodies import read_body
from shared.contracts.decode import decode
from shared.contracts.words import is_name
from shared.errors import BadRequestError, ForbiddenError
from shared.logging import trace_id

if TYPE_CHECKING:
    from services.ingest.member_settings import OwnSettings
    from services.ingest.unread import Totals
    from shared.auth import Verifier

_READ_S = 30.0
_MOST_BYTES = 4 * 1024
_SETTINGS = msgspec.json.Decoder(SettingsRequest)


class SetsSettings(Protocol):
    """`services.ingest.member_settings.set_settings` with its pool."""

    async def __call__(
        self, conversation_id: str, user_id: str, request: SettingsRequest, /, *, trace_id: str | None
    ) -> OwnSettings:
        """Set them."""
        ...


class ReadsUnread(Protocol):
    """`services.ingest.unread.unread_in_all` with its pool."""

    async def __call__(self, user_id: str, /) -> Totals:
        """What is unread in all."""
        ...


class Behind(Protocol):
    """What stands behind it."""

    @property
    def verifier(self) -> Verifier:
        """Of tokens."""

    @property
    def set_settings(self) -> SetsSettings:
        """Sets a user's own settings."""

    @property
    def unread(self) -> ReadsUnread:
        """Reads what is unread in all."""


def add(app: FastAPI, door: Behind, failures: dict[int | str, dict[str, Any]]) -> None:
    """Add the routes. ``failures``: how their errors are described."""

    @app.put(
        "/v1/conversations/{conversation_id}/settings",
        summary="Mute or archive a conversation for a user",
        responses={200: {"model": schemas.OwnSettings}, **failures},
        openapi_extra=takes(schemas.Settings),
    )
    async def set_settings(conversation_id: str, request: Request) -> Response:
        claims = await asking.claims(door.verifier, request)
        found = asking.conversation(conversation_id)
        asked = decode(_SETTINGS, await read_body(request, _MOST_BYTES, within_s=_READ_S), fallback="muted")
        user_id = own(claims, asked.user_id)
        if claims.scope != "gateway":
            asked = msgspec.structs.replace(asked, device_id=None)
        return asking.answer(
            await door.set_settings(found, user_id, asked, trace_id=trace_id(asking.traceparent(request)))
        )

    @app.get(
        "/v1/unread",
        summary="What is unread in all",
        responses={200: {"model": schemas.Totals}, **failures},
        openapi_extra={
            "parameters": [
                {
                    "name": "user_id",
                    "in": "query",
                    "description": "Whose; needed from a service.",
                    "schema": {"type": "string"},
                }
            ]
        },
    )
    async def unread(request: Request) -> Response:
        claims = await asking.claims(door.verifier, request)
        if claims.scope == "gateway":
            raise ForbiddenError("a token of scope gateway does not read here")
        named = request.query_params.get("user_id")
        if named is not None and not is_name(named):
            raise BadRequestError("expected a user id", field="user_id")
        return asking.answer(await door.unread(own(claims, named)))
