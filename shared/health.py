"""The private port of every service: `/healthz`, `/readyz`, `/metrics` (protocol §6)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shared import problems

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    Check = Callable[[], Awaitable[str | None]]

CHECK_S = 2.0


def private_app(
    checks: Mapping[str, Check],
    *,
    warnings: Mapping[str, Check] | None = None,
    metrics: Callable[[], bytes] = generate_latest,
    check_s: float = CHECK_S,
) -> Starlette:
    """The app. A check answers None when all is well, else what is wrong, in a few words without secrets.

    ``warnings``: checks that tell of what has to be put right, and keep nobody from being ready. ``metrics``: their
    text, by default of this process's own; ``check_s``: what a check may take.

    Plain Starlette: for three answers without input, a process need not load all of FastAPI when it starts.
    """

    async def healthz(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> JSONResponse:
        failing, warned = await asyncio.gather(_ask_all(checks, check_s), _ask_all(warnings or {}, check_s))
        told = {"status": "failing" if failing else "ok", "failing": failing}
        return JSONResponse(told | ({"warnings": warned} if warned else {}), status_code=503 if failing else 200)

    async def told_metrics(_: Request) -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE_LATEST)

    answers = {"/healthz": healthz, "/readyz": readyz, "/metrics": told_metrics}
    app = Starlette(
        routes=[Route(path, answer) for path, answer in answers.items()],
        exception_handlers={HTTPException: problems.frameworks},
    )
    app.add_middleware(problems.Faults)
    return app


async def _ask_all(checks: Mapping[str, Check], limit_s: float) -> dict[str, str]:
    answers = await asyncio.gather(*(_ask(check, limit_s) for check in checks.values()))
    return {name: answer for name, answer in zip(checks, answers, strict=True) if answer is not None}


async def _ask(check: Check, limit_s: float) -> str | None:
    try:
        async with asyncio.timeout(limit_s):
            return await check()
    except TimeoutError:
        return f"no answer in {limit_s} s"
    except Exception as error:  # noqa: BLE001 - whatever a check raises is what is wrong
        return type(error).__name__
