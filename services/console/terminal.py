"""What commands for operators share: the way to Postgres, errors, names, and text that is safe to print."""

from __future__ import annotations

import asyncio
import getpass
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import asyncpg
import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.local import endpoints
from deploy.migrate import url_of_role
from services.console.settings import CommandSettings
from shared.errors import WaybillError
from shared.logging import configure
from shared.postgres import open_pool
from shared.settings import load

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from shared.postgres import Pool

_WIDE = 200
"""Columns where standard output is no terminal."""

_TIMEOUT_S = 10.0

StateFolder = Annotated[Path, typer.Option("--state", help="State folder of a running `waybill up`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Who = Annotated[str | None, typer.Option(help="Who you are; default: the operating system's user.")]

DEFAULT_STATE = Path(".state")

Some = TypeVar("Some")


def fail(message: str) -> NoReturn:
    """End the command: an error on standard error, code 1."""
    print(f"waybill: {message}", file=sys.stderr)
    raise typer.Exit(1)


def run(state: Path, work: Callable[[Pool], Awaitable[Some]]) -> Some:
    """Do something with Postgres: WAYBILL_POSTGRES_URL, else that of the stack in ``state``. Errors end the command."""
    settings = load(CommandSettings)
    url = str(settings.postgres_url) if settings.postgres_url else _of_stack(state)
    configure("waybill", settings.log_level)
    try:
        return asyncio.run(_with_pool(url, work))
    except WaybillError as error:
        fail(f"{error.field}: {error.message}" if error.field else _told(error))
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        fail(str(error) or type(error).__name__)


def name_of(who: str | None) -> str:
    """The name that is written down for what is done. Ends the command if there is none."""
    if who is not None:
        return who
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        fail("the operating system does not say who you are: name yourself by --who")


def print_json(document: msgspec.Struct) -> None:
    """One JSON document on a line of its own."""
    print(msgspec.json.encode(document).decode())


def show(*parts: Table | str) -> None:
    """Print tables and lines for people."""
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_WIDE)
    for number, part in enumerate(parts):
        if number:
            console.print()
        console.print(Text(plain(part)) if isinstance(part, str) else part)


def table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A table of plain text; None is an empty cell. Nothing is cut."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text("" if cell is None else plain(str(cell))) for cell in row))
    return made


def plain(text: str) -> str:
    """Text of a record with its control characters made visible: they would command the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


async def _with_pool(url: str, work: Callable[[Pool], Awaitable[Some]]) -> Some:
    async with open_pool(url, size=1, name="waybill-command", timeout_s=_TIMEOUT_S) as pool:
        return await work(pool)


def _of_stack(state: Path) -> str:
    try:
        owner_url = endpoints.read(state / endpoints.FILE).postgres
    except (OSError, ValueError):
        fail(f"set WAYBILL_POSTGRES_URL, or name the state folder of a running `waybill up` (not {state})")
    return url_of_role(owner_url, "console")


def _told(error: WaybillError) -> str:
    cause = error.__cause__
    return error.message if cause is None else f"{error.message}: {str(cause) or type(cause).__name__}"
