"""`waybill revoke` as a process: a row for all gateways, and a hint for those that listen."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from services.console.cli import app
from services.console.revoke import write
from shared import hints
from shared.errors import BadRequestError
from shared.postgres import open_pool
from tests.databases import Database

WAYBILL = Path(sys.executable).with_name("waybill")


async def revoke(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """Code, standard output and error of the command."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("WAYBILL_")}
    process = await asyncio.create_subprocess_exec(
        WAYBILL,
        "revoke",
        *arguments,
        env={**others, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, out.decode(), err.decode()


async def rows(database: Database) -> list[dict[str, Any]]:
    connection = await asyncpg.connect(database.owner_url)
    try:
        return [dict(row) for row in await connection.fetch("SELECT * FROM revocation ORDER BY id")]
    finally:
        await connection.close()


async def test_a_revocation_is_a_row_and_a_hint(database: Database, redis_url: str) -> None:
    url = database.url("console")
    async with Redis.from_url(redis_url) as redis, redis.pubsub() as channel:
        await channel.subscribe(hints.revocations_channel("here"))
        device, token = await asyncio.gather(
            revoke(
                "ann", "--device", "phone", "--reason", "lost", "--keep", "60", "--json",
                WAYBILL_POSTGRES_URL=url, WAYBILL_REDIS_URL=redis_url, WAYBILL_TOPIC_PREFIX="here",
            ),
            revoke("ben", "--token", "t-1", WAYBILL_POSTGRES_URL=url),
        )  # fmt: skip
        message = None
        while message is None or message["type"] != "message":
            message = await channel.get_message(timeout=10)
    assert device[0] == token[0] == 0, (device, token)
    told = json.loads(device[1])
    kept = {row["user_id"]: row for row in await rows(database)}
    assert (kept["ann"]["device_id"], kept["ann"]["jti"], kept["ann"]["reason"]) == ("phone", None, "lost")
    assert 50 < (kept["ann"]["expires_at"] - kept["ann"]["created_at"]).total_seconds() < 70
    assert (kept["ben"]["device_id"], kept["ben"]["jti"], kept["ben"]["expires_at"]) == (None, "t-1", None)
    assert hints.decode(message["data"]) == hints.Revocation(
        user_id="ann", device_id="phone", before=kept["ann"]["before"].timestamp()
    )
    assert (told["id"], told["user_id"], told["device_id"], told["jti"]) == (kept["ann"]["id"], "ann", "phone", None)
    assert told["told"] == 1
    assert "t-1" in token[1]
    assert token[2] == ""


@pytest.mark.parametrize(
    ("user_id", "wrong", "field"),
    [
        ("ann bob", {}, "user"),
        ("ann", {"device_id": ""}, "device"),
        ("ann", {"jti": "x" * 257}, "token"),
        ("ann", {"jti": "\0"}, "token"),
        ("ann", {"reason": ""}, "reason"),
    ],
)
async def test_what_is_refused(module_database: Database, user_id: str, wrong: dict[str, Any], field: str) -> None:
    async with open_pool(module_database.url("console"), size=1, name="tests") as pool:
        with pytest.raises(BadRequestError) as error:
            await write(pool, user_id, **wrong)
    assert error.value.field == field
    assert "ann" not in [row["user_id"] for row in await rows(module_database)]


def test_one_names_a_device_or_a_token() -> None:
    assert CliRunner().invoke(app, ["revoke", "ann", "--token", "x", "--device", "y"]).exit_code == 2


async def test_without_redis_the_row_is_there_all_the_same(module_database: Database) -> None:
    url = module_database.url("console")
    done = await revoke("cat", "--json", WAYBILL_POSTGRES_URL=url, WAYBILL_REDIS_URL="redis://127.0.0.1:1")
    assert done[0] == 0
    assert "find it themselves" in done[2]
    assert json.loads(done[1])["told"] is None
    assert "cat" in [row["user_id"] for row in await rows(module_database)]
