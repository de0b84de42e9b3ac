"""The `waybill` command. Each subcommand is thin; what runs services is started as a program of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import asyncpg
import typer
from aiokafka.errors import KafkaError

from deploy.local import endpoints
from deploy.migrate import MigrationError, migrate_async
from services.console.audit.command import check
from services.console.dead.command import dead
from services.console.demo.command import demo
from services.console.relay.command import relay
from services.console.retention.command import retention
from services.console.revoke import revoke
from services.console.settings import MigrateSettings
from services.console.terminal import fail
from shared.auth import mint
from shared.contracts.words import is_name
from shared.kafka import Topics, ensure_topics
from shared.settings import load

app = typer.Typer(
    name="waybill",
    help="Chat delivery that can be proven: nothing lost, shown twice or out of order.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Service = Literal["ingest", "relay", "gateway", "receipts", "console"]

_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_THROUGH, add_help_option=False)
def up(context: typer.Context) -> None:
    """Run all of Waybill on this machine, with embedded stores, until Ctrl-C."""
    _become("deploy.local.up", context.args)


@app.command()
def serve(service: Annotated[Service, typer.Argument(help="Which service.")]) -> None:
    """Run one service in this process; it is told everything by WAYBILL_… variables."""
    _become(f"services.{service}.main", [])


@app.command()
def migrate() -> None:
    """Bring the database to the newest version; several at once are safe.

    WAYBILL_POSTGRES_OWNER_URL names it. WAYBILL_ROLE_PASSWORD, if set, becomes the services' roles' password. If
    WAYBILL_KAFKA_BOOTSTRAP is set, the topics are made, too.
    """
    settings = load(MigrateSettings)
    try:
        asyncio.run(_migrate(settings))
    except (MigrationError, asyncpg.PostgresError, KafkaError, OSError, RuntimeError, TimeoutError) as error:
        fail(str(error) or type(error).__name__)


@app.command()
def token(
    user: Annotated[str, typer.Argument(help="The user id, or a service's name.")],
    scope: Annotated[Literal["user", "service", "admin"], typer.Option(help="What it may do.")] = "user",
    ttl: Annotated[int, typer.Option(help="Seconds until it ends.")] = 3600,
    device: Annotated[str | None, typer.Option(help="Bind it to one device.")] = None,
    state: Annotated[Path, typer.Option(help="State folder of a running `waybill up`.")] = Path(".state"),
) -> None:
    """Print a token for local use, signed with WAYBILL_AUTH_SECRET, else with the secret of a running `waybill up`."""
    for what, name in (("user", user), ("device", device)):
        if name is not None and not is_name(name):
            fail(f"the {what} must be 1 to 64 characters of A–Z a–z 0–9 . _ : @ -")
    secret = os.environ.get("WAYBILL_AUTH_SECRET")
    if not secret:
        try:
            secret = endpoints.read(state / endpoints.FILE).auth_secret
        except (OSError, ValueError):
            fail(f"set WAYBILL_AUTH_SECRET, or name the state folder of a running `waybill up` (not {state})")
    print(mint(secret, user, scope=scope, ttl_s=ttl, device=device))


@app.command(context_settings=_THROUGH, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure: `waybill bench NAME [--json]`."""
    _become("bench.run", context.args)


app.command()(demo)
app.command()(revoke)
app.add_typer(check)
app.add_typer(dead)
app.add_typer(relay)
app.add_typer(retention)


async def _migrate(settings: MigrateSettings) -> None:
    password = settings.role_password.get_secret_value() if settings.role_password else None
    await migrate_async(str(settings.postgres_owner_url), role_password=password)
    if settings.kafka_bootstrap:
        await ensure_topics(
            settings.kafka_bootstrap,
            Topics(settings.topic_prefix),
            replication=settings.kafka_replication,
            min_insync=settings.kafka_min_insync,
            erase_within_s=settings.erase_within_s,
        )


def _become(module: str, arguments: list[str]) -> NoReturn:
    # Not an import: no service imports another, and a process that is replaced keeps its id for whoever signals it.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])  # noqa: S606 - our own program


def main() -> None:
    """The program."""
    app()
