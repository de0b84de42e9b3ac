"""The console's public port: a page, and the API behind it. Every call but the page itself needs an admin's token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse

from services.console.answers import describe
from services.console.dead import api as dead
from services.console.health import Health, look
from services.console.relay import api as relay
from shared import problems
from shared.auth import bearer
from shared.errors import ForbiddenError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

    from shared.auth import Verifier
    from shared.postgres import Pool

_PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
_HEADERS = {
    # The page carries its own script and style; it may load nothing else, and talk to its own origin only.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def public_app(verifier: Verifier, session: aiohttp.ClientSession, services: Mapping[str, str], pool: Pool) -> FastAPI:
    """The app. ``services``: private base addresses by name."""
    app = FastAPI(title="Waybill console", version="1", docs_url="/docs", redoc_url=None)
    problems.install(app)

    async def admin(request: Request) -> None:
        claims = await verifier.verify(bearer(request.headers.get("authorization")))
        if claims.scope != "admin":
            raise ForbiddenError("the console needs a token of the scope admin")
        request.state.who = claims.subject

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE, headers=_HEADERS)

    @app.get("/api/health", dependencies=[Depends(admin)])
    async def health() -> Health:
        return await look(session, services)

    for routes in (dead, relay):
        app.include_router(routes.router(pool, _who), dependencies=[Depends(admin)])
    describe(app, [*dead.KINDS, *relay.KINDS])
    return app


def _who(request: Request) -> str:
    return str(request.state.who)
