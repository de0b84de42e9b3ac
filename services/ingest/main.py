"""The process: one public port, one private port, writer lanes between them and Postgres."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import aiohttp

from services.ingest.api import Door, public_app
from services.ingest.conversations import Conversations
from services.ingest.counting import Counting
from services.ingest.history import history
from services.ingest.lanes import Lanes, Limits
from services.ingest.member_settings import set_settings
from services.ingest.moderation import Hook, Moderated
from services.ingest.readiness import Readiness
from services.ingest.settings import IngestSettings
from services.ingest.unread import unread_in_all
from services.ingest.writer import Rules, Writer
from shared.auth import Verifier
from shared.health import private_app
from shared.postgres import open_pool
from shared.readers import readers
from shared.runtime import http, run
from shared.settings import load
from shared.timeline import page

if TYPE_CHECKING:
    from services.ingest.lanes import Write

DRAIN_S = 10.0
"""How long what is queued at SIGTERM may take; then it stays without an answer, and its senders try again."""


async def serve(settings: IngestSettings, stop: asyncio.Event) -> None:
    """Run ingest until ``stop`` is set and what was accepted is written."""
    url, timeout_s = str(settings.postgres_url), settings.ingest_send_timeout_s
    digest_key = settings.digest_key.get_secret_value().encode()
    async with AsyncExitStack() as stack:
        # Pools of their own: neither a lane nor a reader can take the other's last connection.
        writers = await stack.enter_async_context(
            open_pool(url, size=settings.ingest_lanes, name="waybill ingest lanes", timeout_s=timeout_s)
        )
        pool = await stack.enter_async_context(
            open_pool(
                url, size=settings.postgres_pool - settings.ingest_lanes, name="waybill ingest", timeout_s=timeout_s
            )
        )
        write = await _writing(settings, Writer(writers, timeout_s, _rules(settings)), stack)
        lanes = Lanes(write, _limits(settings))
        readiness = Readiness(pool)

        async def draining() -> str | None:
            return "draining" if stop.is_set() else None

        private = private_app({"process": draining, "postgres": readiness.postgres})
        public = public_app(
            Door(
                verifier=Verifier(settings),
                lanes=lanes,
                conversations=Conversations(pool, digest_key, timeout_s, group_size=settings.ingest_group_size),
                pages=partial(page, pool),
                readers=partial(readers, pool),
                history=partial(history, pool, settings.ingest_edit_history),
                set_settings=partial(set_settings, pool, timeout_s=timeout_s),
                unread=partial(unread_in_all, pool, timeout_s=timeout_s),
                digest_key=digest_key,
                max_body=settings.ingest_max_body_bytes,
                max_request=settings.ingest_max_request_bytes,
            )
        )
        async with http(private, settings.private_host, settings.ingest_private_port), asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(lanes.run(), name="lanes")
            counting = tasks.create_task(Counting(pool).run(), name="counting")
            async with http(public, settings.host, settings.ingest_port):
                await stop.wait()
            counting.cancel()
            lanes.stop()
            await asyncio.wait([writing], timeout=DRAIN_S)
            writing.cancel()


async def _writing(settings: IngestSettings, writer: Writer, stack: AsyncExitStack) -> Write:
    if settings.moderation_url is None:
        return writer.write
    connector = aiohttp.TCPConnector(limit=settings.ingest_lanes)
    session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
    hook = Hook(session, str(settings.moderation_url), settings.moderation_timeout_ms / 1000)
    return Moderated(writer, hook, settings.moderation_when_away).write


def _rules(settings: IngestSettings) -> Rules:
    return Rules(
        edit_window_s=settings.ingest_edit_window_s,
        recall_window_s=settings.ingest_recall_window_s,
        group_size=settings.ingest_group_size,
    )


def _limits(settings: IngestSettings) -> Limits:
    return Limits(
        lanes=settings.ingest_lanes,
        gather_s=settings.ingest_gather_ms / 1000,
        batch_items=settings.ingest_batch_items,
        batch_bytes=settings.ingest_batch_bytes,
        queue_items=settings.ingest_queue_items,
        queue_bytes=settings.ingest_queue_bytes,
        send_timeout_s=settings.ingest_send_timeout_s,
    )


def main() -> None:
    """Entry of `python -m services.ingest.main`."""
    settings = load(IngestSettings)
    run("ingest", settings.log_level, partial(serve, settings))


if __name__ == "__main__":
    main()
