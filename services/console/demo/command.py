"""`waybill demo` as a command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import asyncpg
import typer
from waybill_client import WaybillError

from deploy.local import endpoints
from deploy.local.interrupts import Interrupts
from deploy.local.running import NotRunningError, running
from services.console.demo import progress
from services.console.demo.damage import Damage, spoil
from services.console.demo.play import Outcome, Play
from services.console.demo.report import report, tell
from services.console.demo.text import NoTextError, lines_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_INTERRUPTED = 130
_EXPECTED = (NoTextError, NotRunningError, WaybillError, asyncpg.PostgresError, OSError, ValueError, RuntimeError)


def demo(
    *,
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
    # That sockets are refused while a gateway is dead is the plan, not news.
    logging.getLogger("waybill_client").setLevel(logging.ERROR)
    interrupts = Interrupts()
    with interrupts.handled():
        try:
            texts = lines_of(text)
            with _stack(endpoints_file) as (stack, done):
                outcome = asyncio.run(_play(Play(stack, texts, messages, rate), interrupts))
                code = _INTERRUPTED if outcome is None else finish(outcome, damage, as_json=as_json)
                if code != 1 or damage is not None:
                    done()
        except KeyboardInterrupt:
            code = _INTERRUPTED
        except _EXPECTED as error:
            print(f"waybill demo: {error}", file=sys.stderr)
            code = 1
    raise typer.Exit(code)


def finish(outcome: Outcome, damage: Damage | None, *, as_json: bool) -> int:
    """Judge a run, after damaging its recordings if that is asked for, and print what is found; the exit code."""
    if damage is not None:
        spoil(outcome.recordings, damage)
    return tell(report(outcome), as_json=as_json)


async def _play(play: Play, interrupts: Interrupts) -> Outcome | None:
    """Play with the bar until the end, or until a signal (then None). Raises the first of what went wrong."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    with interrupts.in_loop(stop, hurry):
        playing = asyncio.create_task(progress.shown(play))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if playing.done():
            try:
                return playing.result()
            except BaseExceptionGroup as errors:
                raise _first(errors) from None
        playing.cancel()
        await asyncio.wait({playing, asyncio.ensure_future(hurry.wait())}, return_when=asyncio.FIRST_COMPLETED)
        return None


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
