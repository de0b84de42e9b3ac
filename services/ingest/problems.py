"""Every error that leaves over HTTP, as RFC 9457 problem JSON with the protocol's code."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.errors import BadRequestError, InternalError, NotFoundError, UnauthenticatedError, WaybillError

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

MEDIA_TYPE = "application/problem+json"


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


def install(app: FastAPI) -> None:
    """Answer every exception of an app with a problem; a traceback goes to the log alone."""

    @app.exception_handler(WaybillError)
    async def ours(_: Request, error: WaybillError) -> JSONResponse:
        return problem(error)

    @app.exception_handler(HTTPException)
    async def frameworks(_: Request, error: HTTPException) -> JSONResponse:
        kind = NotFoundError if error.status_code == HTTPStatus.NOT_FOUND else BadRequestError
        return problem(kind(str(error.detail)), status=error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def shape(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return problem(BadRequestError(first["msg"], field=".".join(str(part) for part in first["loc"][1:]) or None))

    @app.exception_handler(Exception)
    async def fault(_: Request, __: Exception) -> JSONResponse:
        return problem(InternalError("a fault of ours"))
