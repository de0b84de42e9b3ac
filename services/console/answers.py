"""Bodies of the console's API: decoded and encoded by msgspec, and described in OpenAPI by the same types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import Response
from fastapi.openapi.utils import get_openapi

from shared.bodies import read_body
from shared.contracts.decode import decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI, Request

_JSON = "application/json"
_REF = "#/components/schemas/{name}"
_MAX_BODY = 64 * 1024
_READ_S = 10.0

_ENCODER = msgspec.json.Encoder()

Some = TypeVar("Some")


class Problem(msgspec.Struct, omit_defaults=True):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    field: str | None = None
    retry_after_ms: int | None = None


def reply(content: msgspec.Struct) -> Response:
    """The answer with this body."""
    return Response(_ENCODER.encode(content), media_type=_JSON)


async def body(request: Request, decoder: msgspec.json.Decoder[Some], *, fallback: str) -> Some:
    """The request's body. Raises `BadRequestError` with the field, `TooLargeError`, `TimedOutError`."""
    return decode(decoder, await read_body(request, _MAX_BODY, within_s=_READ_S), fallback=fallback)


def answers(kind: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: 200 with this body, else a problem."""
    return {
        200: {"description": "Done", "content": {_JSON: {"schema": _ref(kind)}}},
        "default": {"description": "A problem", "content": {"application/problem+json": {"schema": _ref(Problem)}}},
    }


def takes(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A route's `openapi_extra` for a body of this kind."""
    return {"requestBody": {"required": True, "content": {_JSON: {"schema": _ref(kind)}}}}


def describe(app: FastAPI, kinds: Sequence[type[msgspec.Struct]]) -> None:
    """Make the app's OpenAPI document complete: these bodies, problems, bearer tokens."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = made.setdefault("components", {})
            _, named = msgspec.json.schema_components([*kinds, Problem], ref_template=_REF)
            components.setdefault("schemas", {}).update(named)
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}}
            made["security"] = [{"bearer": []}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's own way to extend the document


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
