"""The bodies of HTTP requests, bounded in size and in time."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from shared.errors import BadRequestError, TimedOutError, TooLargeError

if TYPE_CHECKING:
    from starlette.requests import Request

_DIGITS = re.compile(r"\A[0-9]{1,19}\Z")


async def read_body(request: Request, limit: int, *, within_s: float) -> bytes:
    """The request's body, of at most ``limit`` bytes.

    Raises `TooLargeError`, before it is read where its length is told; `TimedOutError`; `BadRequestError` if the client
    goes away.
    """
    length = request.headers.get("content-length", "")
    if _DIGITS.match(length) and int(length) > limit:
        raise TooLargeError(f"a request has at most {limit} bytes")
    read = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.stream():
                read += chunk
                if len(read) > limit:
                    raise TooLargeError(f"a request has at most {limit} bytes")
    except TimeoutError:
        raise TimedOutError("the request did not come in time") from None
    except ClientDisconnect:
        raise BadRequestError("the request ended early") from None
    return bytes(read)
