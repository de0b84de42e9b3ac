"""Who asks over HTTP, what the path and the query name, and how it is answered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from fastapi import Response

from shared.auth import Claims, Verifier, bearer
from shared.contracts.frames import MAX_PAGE
from shared.contracts.words import TRACEPARENT, UUID
from shared.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import Request

_UUID = re.compile(UUID)
_TRACEPARENT = re.compile(TRACEPARENT)
_ENCODER = msgspec.json.Encoder()
_DIGITS = re.compile(r"\A[0-9]{1,19}\Z")


async def claims(verifier: Verifier, request: Request) -> Claims:
    """Of the request's token. Raises `UnauthenticatedError`."""
    return await verifier.verify(bearer(request.headers.get("authorization")))


def traceparent(request: Request) -> str | None:
    """The request's, if it is well formed."""
    found = request.headers.get("traceparent")
    return found if found is not None and _TRACEPARENT.match(found) else None


def conversation(text: str) -> str:
    """A conversation id in lower case. Raises `BadRequestError`."""
    if not _UUID.match(text):
        raise BadRequestError("expected a UUID", field="conversation_id")
    return text.lower()


def number(query: Mapping[str, str], name: str, *, low: int, high: int) -> int:
    """A number of the query, which has it. Raises `BadRequestError`."""
    text = query[name]
    if not _DIGITS.match(text) or not low <= int(text) <= high:
        raise BadRequestError(f"expected a number from {low} to {high}", field=name)
    return int(text)


def limit(query: Mapping[str, str]) -> int:
    """Most that one page holds; 100 if the query does not say. Raises `BadRequestError`."""
    return number(query, "limit", low=1, high=MAX_PAGE) if "limit" in query else 100


def answer(content: object, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(_ENCODER.encode(content), status_code=status, media_type="application/json")
