"""The console's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from services.console.api import public_app
from services.console.settings import ConsoleSettings
from shared.auth import Verifier
from shared.health import private_app
from shared.logging import logger
from shared.postgres import open_pool
from shared.runtime import http, run
from shared.settings import load

if TYPE_CHECKING:
    import asyncio

    from shared.postgres import Pool

_TIMEOUT_S = 10.0


async def serve(settings: ConsoleSettings, stop: asyncio.Event) -> None:
    """Serve both ports until ``stop`` is set. While Postgres is away, the health of services is still shown."""
    services = {name: str(url) for name, url in settings.console_services.items()}
    url, size = str(settings.postgres_url), settings.postgres_pool
    async with (
        aiohttp.ClientSession() as session,
        open_pool(url, size=size, name="waybill-console", timeout_s=_TIMEOUT_S) as pool,
        http(private_app({"postgres": lambda: _postgres(pool)}), settings.private_host, settings.console_private_port),
        http(public_app(Verifier(settings), session, services, pool), settings.host, settings.console_port),
    ):
        logger(__name__).info("ready", port=settings.console_port)
        await stop.wait()


async def _postgres(pool: Pool) -> str | None:
    await pool.fetchval("SELECT 1")
    return None


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    settings = load(ConsoleSettings)
    run("console", settings.log_level, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
