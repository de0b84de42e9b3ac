"""All services as processes on stores that the test has: nobody starts again what dies."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deploy.local.endpoints import socket_of
from deploy.local.parts import ServicePart
from deploy.local.services import choose_ports, plan, public
from shared.kafka import Topics, ensure_topics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from deploy.local.services import Service
    from tests.databases import Database

SECRET = "a secret of at least 32 bytes for tests"
DIGEST_KEY = "a digest key for tests"


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of some services."""

    database: Database
    kafka: str
    redis: str

    @property
    def postgres_url(self) -> str:
        """The owner's address."""
        return self.database.owner_url


class Services:
    """Started by `services`."""

    def __init__(self, stores: Stores, prefix: str, folder: Path, environment: Mapping[str, str]) -> None:
        base = {name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")}
        self.stores = stores
        self._topics = Topics(prefix)
        self._ports = choose_ports("auto", folder / "service_ports.json", 1)
        planned = plan(
            stores,
            self._ports,
            gateways=1,
            secret=SECRET,
            digest_key=DIGEST_KEY,
            base={**base, "WAYBILL_TOPIC_PREFIX": prefix, **environment},
        )
        self.parts = {
            service.name: ServicePart(self._with_role(service), folder)
            for service in planned
            if service.name != "console"
        }

    def _with_role(self, service: Service) -> Service:
        url = self.stores.database.url(service.kind)
        return replace(service, environment={**service.environment, "WAYBILL_POSTGRES_URL": url})

    @property
    def socket(self) -> str:
        return socket_of(public(self._ports, "gateway"))

    def private(self, name: str) -> str:
        """Where a service's health and metrics are."""
        return self.parts[name].service.private

    async def start(self) -> None:
        await ensure_topics(self.stores.kafka, self._topics)
        for part in self.parts.values():
            await part.start()
        await asyncio.gather(*(part.ready() for part in self.parts.values()))

    async def stop(self) -> None:
        """Ask all to end, and see that none had ended by itself."""
        died = [name for name, part in self.parts.items() if not part.alive()]
        for part in self.parts.values():
            await part.stop()
        assert died == []


@asynccontextmanager
async def services(
    stores: Stores, prefix: str, folder: Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Services]:
    """Ingest, relay, gateway and receipts, with topics under this prefix."""
    made = Services(stores, prefix, folder, environment or {})
    try:
        await made.start()
        yield made
    finally:
        await made.stop()
