"""The console's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp

from services.console.api import public_app
from services.console.settings import ConsoleSettings
from shared.auth import Verifier
from shared.health import private_app
from shared.logging import logger
from shared.runtime import http, run
from shared.settings import load

if TYPE_CHECKING:
    import asyncio


async def serve(settings: ConsoleSettings, stop: asyncio.Event) -> None:
    """Serve both ports until ``stop`` is set. The console needs no store: it is ready once it listens."""
    services = {name: str(url) for name, url in settings.console_services.items()}
    async with (
        aiohttp.ClientSession() as session,
        http(private_app({}), settings.private_host, settings.console_private_port),
        http(public_app(Verifier(settings), session, services), settings.host, settings.console_port),
    ):
        logger(__name__).info("ready", port=settings.console_port)
        await stop.wait()


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    settings = load(ConsoleSettings)
    run("console", settings.log_level, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
