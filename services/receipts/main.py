"""The receipts process: acks in, marks and receipts out."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from services.receipts.announcing import Announcer
from services.receipts.consumer import AckConsumer
from services.receipts.letters import Letters
from services.receipts.settings import ReceiptsSettings
from services.receipts.store import ACKS, Store
from shared.dead_letter import Graves
from shared.health import private_app
from shared.kafka import Topics
from shared.postgres import open_pool
from shared.runtime import http, run
from shared.settings import load

if TYPE_CHECKING:
    from shared.health import Check

_POOL = 3
"""One connection applies, one announces or tries letters again, one answers `readyz`: applying more than one batch at a
time would gain nothing."""


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    settings = load(ReceiptsSettings)
    run("receipts", settings.log_level, partial(serve, settings))


async def serve(settings: ReceiptsSettings, stop: asyncio.Event) -> None:
    """Run until ``stop`` is set."""
    topics = Topics(settings.topic_prefix)
    async with open_pool(
        str(settings.postgres_url), size=min(_POOL, settings.postgres_pool), name="waybill-receipts"
    ) as pool:
        store = Store(pool, topics.acks, large=settings.receipts_large_group)
        graves = Graves(settings.kafka_bootstrap, topics.dead, client_id="waybill-receipts-dead")
        consumer = AckConsumer(settings, topics.acks, f"{settings.topic_prefix}.receipts", store, graves)
        announcer = Announcer(store, consumer.partitions, every_s=settings.receipts_announce_ms / 1000)
        app = private_app(_checks(store, consumer))
        async with http(app, settings.private_host, settings.receipts_private_port), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(consumer.run(), name="acks"),
                group.create_task(announcer.run(), name="announce"),
                group.create_task(Letters(pool, ACKS, store).run(), name="letters"),
            ]
            await stop.wait()
            # In the middle of a batch too: it is applied whole or not at all, and the offsets say which.
            for task in tasks:
                task.cancel()


def _checks(store: Store, consumer: AckConsumer) -> dict[str, Check]:
    async def postgres() -> str | None:
        await store.ping()
        return None

    async def assignment() -> str | None:
        return consumer.assignment_problem()

    async def breaker() -> str | None:
        return consumer.stopped

    return {"postgres": postgres, "kafka": consumer.kafka_problem, "assignment": assignment, "breaker": breaker}


if __name__ == "__main__":
    main()
