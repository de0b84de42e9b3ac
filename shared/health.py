"""The private port of every service: `/healthz`, `/readyz`, `/metrics` (protocol §6)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from shared import problems

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Check = Callable[[], Awaitable[str | None]]

CHECK_S = 2.0


def private_app(checks: Mapping[str, Check]) -> FastAPI:
    """The app. A check answers None when all is well, else what is wrong, in a few words without secrets."""
    app = FastAPI(title="waybill private", docs_url=None, redoc_url=None, openapi_url=None)
    problems.install(app)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        answers = await asyncio.gather(*(_ask(check) for check in checks.values()))
        failing = {name: answer for name, answer in zip(checks, answers, strict=True) if answer is not None}
        status = "failing" if failing else "ok"
        return JSONResponse({"status": status, "failing": failing}, status_code=503 if failing else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _ask(check: Check) -> str | None:
    try:
        async with asyncio.timeout(CHECK_S):
            return await check()
    except TimeoutError:
        return f"no answer in {CHECK_S} s"
    except Exception as error:  # noqa: BLE001 - whatever a check raises is what is wrong
        return type(error).__name__
