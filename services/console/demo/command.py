"""`waybill demo` as a command."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import asyncpg
import typer

from deploy.local import endpoints
from deploy.local.interrupts import Interrupts
from deploy.local.running import NotRunningError, running
from services.console.demo import progress
from services.console.demo.damage import Damage, spoil
from services.console.demo.play import Play
from services.console.demo.report import report, tell
from services.console.demo.text import NoTextError, lines_of
from waybill_client import WaybillError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_INTERRUPTED = 130
_EXPECTED = (NoTextError, NotRunningError, WaybillError, asyncpg.PostgresError, OSError, ValueError, RuntimeError)


def demo(
    messages: Annotated[int, typer.Option(min=100, help="How many messages.")] = 5000,
    text: Annotated[Path | None, typer.Option(help="Text whose lines are sent; default: the documentation.")] = None,
    rate: Annotated[float, typer.Option(min=1, help="Messages a second.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
    endpoints_file: Annotated[
        Path | None,
        typer.Option("--endpoints", help="endpoints.json of a running `waybill up`; default: one of its own."),
    ] = None,
    damage: Annotated[Damage | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show that nothing is lost: twelve devices talk while parts are killed; exit code 1 if a promise was broken."""
    with Interrupts().handled():
        try:
            code = _demo(messages, text, rate, endpoints_file, damage, as_json=as_json)
        except KeyboardInterrupt:
            code = _INTERRUPTED
    raise typer.Exit(code)


def _demo(
    messages: int, text: Path | None, rate: float, file: Path | None, damage: Damage | None, *, as_json: bool
) -> int:
    code = 1
    try:
        texts = lines_of(text)
        with _stack(file) as (stack, done):
            outcome = asyncio.run(progress.shown(Play(stack, texts, messages, rate)))
            if damage is not None:
                spoil(outcome.recordings, damage)
            code = tell(report(outcome), as_json=as_json)
            if code == 0 or damage is not None:
                done()
    except* _EXPECTED as errors:
        print(f"waybill demo: {_first(errors)}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _stack(file: Path | None) -> Iterator[tuple[Path, Callable[[], None]]]:
    """The `endpoints.json` of a running stack, and what to call when its data and logs are of no further use.

    Without a file a stack is started for as long as the block runs.
    """
    if file is not None:
        endpoints.read(file)
        yield file, lambda: None
        return
    folder = Path(tempfile.mkdtemp(prefix="waybill-demo-"))
    # The stores of root's own demo run as another user, who has to get to their folders below.
    folder.chmod(0o711)
    keep = True

    def done() -> None:
        nonlocal keep
        keep = False

    try:
        with contextlib.ExitStack() as stack:
            with progress.waiting("starting Postgres, Kafka, Valkey and the services"):
                local = stack.enter_context(running(folder, ports="auto"))
            yield local.file, done
    except KeyboardInterrupt:
        done()
        raise
    finally:
        if keep:
            print(f"waybill demo: data and logs are kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _first(errors: BaseException) -> BaseException:
    return _first(errors.exceptions[0]) if isinstance(errors, BaseExceptionGroup) else errors
