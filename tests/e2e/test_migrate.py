from __future__ import annotations

import asyncio
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from deploy.migrate import FOLDER, ROLES
from shared.kafka import Topics
from tests.databases import ROLE_PASSWORD

if TYPE_CHECKING:
    from tests.stack import Stores

WAYBILL = Path(sys.executable).with_name("waybill")


@pytest.mark.promise("protocol.8.migrate")
async def test_several_at_once_bring_an_empty_server_to_the_newest_version(stores: Stores, topic_prefix: str) -> None:
    name = f"waybill_{secrets.token_hex(6)}"
    url = urlunsplit(urlsplit(stores.postgres_url)._replace(path=f"/{name}"))
    environment = {
        **os.environ,
        "WAYBILL_POSTGRES_OWNER_URL": url,
        "WAYBILL_ROLE_PASSWORD": ROLE_PASSWORD,
        "WAYBILL_KAFKA_BOOTSTRAP": stores.kafka,
        "WAYBILL_TOPIC_PREFIX": topic_prefix,
    }

    async def migrate() -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            WAYBILL, "migrate", env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        return process.returncode, said.decode()

    try:
        async with asyncio.timeout(150):
            done = await asyncio.gather(*(migrate() for _ in range(3)))
            again = await migrate()
        assert [*done, again] == [(0, "")] * 4
        connection = await asyncpg.connect(url)
        try:
            versions = await connection.fetch("SELECT version FROM schema_migrations ORDER BY version")
            wanted = sorted(file.name.partition("_")[0] for file in FOLDER.glob("*.sql"))
            assert [row["version"] for row in versions] == wanted
            roles = await connection.fetch(
                "SELECT rolname FROM pg_roles WHERE rolname LIKE 'waybill\\_%' AND rolcanlogin"
            )
            assert {row["rolname"] for row in roles} >= {f"waybill_{role}" for role in ROLES}
        finally:
            await connection.close()
        admin = AIOKafkaAdminClient(bootstrap_servers=stores.kafka)
        await admin.start()
        try:
            assert set(await admin.list_topics()) >= set(Topics(topic_prefix).all)
        finally:
            await admin.close()
    finally:
        connection = await asyncpg.connect(stores.postgres_url)
        try:
            await connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        finally:
            await connection.close()
