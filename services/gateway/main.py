"""The gateway's process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from services.gateway.acks import Acks
from services.gateway.catchup import CatchUp
from services.gateway.connection import Parts
from services.gateway.fanout import Fanout
from services.gateway.presence import Presence
from services.gateway.recheck import Recheck
from services.gateway.sends import Sends
from services.gateway.settings import GatewaySettings
from services.gateway.socket import Sockets
from services.gateway.stream import Stream
from shared.auth import Verifier
from shared.health import private_app
from shared.kafka import Topics
from shared.logging import logger
from shared.postgres import open_pool
from shared.runtime import http, run
from shared.settings import load

if TYPE_CHECKING:
    from shared.postgres import Pool

_ACKS_S = 5.0

_EVENTS_PAUSE_S = 0.002
_RECEIPTS_PAUSE_S = 0.02
"""A tick may wait a little longer than a message; every read costs, here and in the broker."""


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Run the gateway until ``stop`` is set, then drain it."""
    topics = Topics(settings.topic_prefix)
    fanout = Fanout()
    client_id = f"waybill-gateway-{settings.gateway_name}"
    acks = Acks(
        settings.kafka_bootstrap, topics.acks, flush_s=settings.gateway_ack_flush_ms / 1000, client_id=client_id
    )
    sends = Sends(
        str(settings.ingest_url),
        settings.secret.get_secret_value(),
        timeout_s=settings.gateway_send_timeout_s,
        most=settings.gateway_send_queue,
    )
    presence = Presence(
        str(settings.redis_url),
        prefix=settings.topic_prefix,
        gateway=settings.gateway_name,
        refresh_s=settings.gateway_heartbeat_s,
    )
    async with (
        open_pool(str(settings.postgres_url), size=settings.postgres_pool, name="waybill-gateway") as pool,
        asyncio.TaskGroup() as tasks,
    ):
        recheck = Recheck(pool, fanout)
        streams = [
            Stream(
                settings.kafka_bootstrap,
                topics,
                topic,
                fanout,
                client_id=f"{client_id}-{topic}",
                pause_s=pause_s,
                missed=recheck.ask,
            )
            for topic, pause_s in ((topics.events, _EVENTS_PAUSE_S), (topics.receipts, _RECEIPTS_PAUSE_S))
        ]
        serving = asyncio.Event()
        parts = Parts(
            settings=settings,
            pool=pool,
            verifier=Verifier(settings),
            fanout=fanout,
            catch_up=CatchUp(pool, settings.postgres_pool),
            acks=acks,
            sends=sends,
            presence=presence,
        )
        loops = [
            *(tasks.create_task(stream.run(), name="stream") for stream in streams),
            tasks.create_task(recheck.run(), name="recheck"),
            tasks.create_task(acks.run(), name="acks"),
            tasks.create_task(sends.run(), name="sends"),
            tasks.create_task(presence.run(), name="presence"),
        ]
        app = private_app({"postgres": lambda: _postgres(pool), "sockets": lambda: _serving(serving, streams)})
        async with http(app, settings.private_host, settings.gateway_private_port):
            stopping = tasks.create_task(stop.wait(), name="stopping")
            starting = tasks.create_task(_all_started(streams), name="starting")
            await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
            starting.cancel()
            if not stop.is_set():
                async with Sockets(parts).serving(settings.host, settings.gateway_port):
                    logger(__name__).info("serving", port=settings.gateway_port)
                    serving.set()
                    await stopping
                    serving.clear()
                if not await acks.drained(_ACKS_S):
                    logger(__name__).warning("acks were not confirmed by Kafka; clients' cursors bring them again")
        for loop in loops:
            loop.cancel()


async def _postgres(pool: Pool) -> str | None:
    await pool.fetchval("SELECT 1")
    return None


async def _all_started(streams: list[Stream]) -> Literal[True]:
    for stream in streams:
        await stream.started.wait()
    return True


async def _serving(serving: asyncio.Event, streams: list[Stream]) -> str | None:
    if serving.is_set():
        return None
    away = [stream.away for stream in streams if not stream.started.is_set() and stream.away]
    return f"positions in Kafka are not fixed: {away[0]}" if away else "not open"


def main() -> None:
    """Entry of the process."""
    settings = load(GatewaySettings)
    run("gateway", settings.log_level, lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
