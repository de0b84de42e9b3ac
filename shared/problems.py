"""Every error that leaves over HTTP, as RFC 9457 problem JSON with the protocol's code."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from shared.errors import BadRequestError, InternalError, NotFoundError, UnauthenticatedError, WaybillError
from shared.logging import logger

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MEDIA_TYPE = "application/problem+json"

log = logger(__name__)


def problem(error: WaybillError, *, status: int | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """The answer for an error. ``status`` where HTTP has one that the protocol's list has not."""
    told = error.as_dict()
    status = status or error.status
    headers = dict(headers or {})
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_ms / 1000))
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    detail = told.pop("message")
    content = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail, **told}
    return JSONResponse(content, status_code=status, headers=headers, media_type=MEDIA_TYPE)


async def frameworks(_: Request, error: Exception) -> JSONResponse:
    """The answer for what the framework itself refuses."""
    assert isinstance(error, HTTPException)
    kind = NotFoundError if error.status_code == HTTPStatus.NOT_FOUND else BadRequestError
    return problem(kind(str(error.detail)), status=error.status_code, headers=dict(error.headers or {}))


def install(app: FastAPI) -> None:
    """Answer every exception of an app with a problem; a traceback goes to the log alone."""
    from fastapi.exceptions import RequestValidationError  # noqa: PLC0415 - private ports do without FastAPI

    @app.exception_handler(WaybillError)
    async def ours(_: Request, error: WaybillError) -> JSONResponse:
        return problem(error)

    app.add_exception_handler(HTTPException, frameworks)

    @app.exception_handler(RequestValidationError)
    async def shape(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return problem(BadRequestError(first["msg"], field=".".join(str(part) for part in first["loc"][1:]) or None))

    app.add_middleware(Faults)


class Faults:
    """Answers what nobody else caught. Not an exception handler: those raise again, which costs the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            if begun:
                raise
            log.exception("a request failed", path=scope.get("path"))
            await problem(InternalError("a fault of ours"))(scope, receive, send)
