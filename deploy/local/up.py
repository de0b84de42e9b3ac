"""`waybill up`: the stores and every service on this machine, as processes of their own, until Ctrl-C."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from aiokafka.errors import KafkaError

from deploy.local import endpoints as addresses
from deploy.local import ports as store_ports
from deploy.local.endpoints import Endpoints
from deploy.local.interrupts import Interrupts
from deploy.local.jars import WrongJarError
from deploy.local.lock import Record, Records, StateInUseError, StateLock
from deploy.local.parts import ServicePart, StorePart
from deploy.local.process import StartError
from deploy.local.secret_files import kept
from deploy.local.services import PortTakenError, choose_ports, names, plan, private, public
from deploy.local.stack import STOP_ORDER, Stack
from deploy.local.supervisor import Supervisor
from deploy.migrate import MigrationError, migrate_async
from shared.kafka import Topics, ensure_topics
from shared.settings import ErasureSettings, load

INTERRUPTED = 130
"""What a shell expects of a command that Ctrl-C ended before it had begun its work."""

EXPECTED = (StartError, StateInUseError, PortTakenError, MigrationError, WrongJarError, KafkaError, OSError)
"""What may keep a stack from running; people are told in a line, without a traceback."""

_ORPHAN_POLL_SECONDS = 0.5
_CHILDREN_POLL_SECONDS = 0.25

PortChoice = Literal["fixed", "auto"]


@dataclass(frozen=True, slots=True)
class Options:
    """`parent`: end when this is no longer the parent process."""

    state: Path
    ports: PortChoice
    gateways: int
    parent: int | None


def command(
    state: Annotated[Path, typer.Option(help="Folder of data, logs and endpoints.json.")] = Path(".state"),
    ports: Annotated[PortChoice, typer.Option(help="`fixed` (8400 …) or `auto` (free ones).")] = "fixed",
    gateways: Annotated[int, typer.Option(min=1, max=16, help="How many gateways.")] = 1,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run all of Waybill on this machine until Ctrl-C: stores, migrations, topics, services."""
    raise typer.Exit(run(Options(state.absolute(), ports, gateways, parent)))


def run(options: Options) -> int:
    """Run until a signal; the process's exit code."""
    interrupts = Interrupts()
    with interrupts.handled():
        try:
            options.state.mkdir(parents=True, exist_ok=True)
            _clear(options.state)
            with Stack(options.state, ports=store_ports.DEFAULT if options.ports == "fixed" else "auto") as stack:
                served = asyncio.run(Local(options, stack, interrupts).run())
        except EXPECTED as error:
            print(f"waybill up: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return INTERRUPTED
    return 0 if served else INTERRUPTED


class Local:
    """One life of a local stack whose stores run already."""

    def __init__(self, options: Options, stack: Stack, interrupts: Interrupts) -> None:
        self._options = options
        self._stack = stack
        self._interrupts = interrupts
        self._secret = os.environ.get("WAYBILL_AUTH_SECRET") or kept(options.state / "auth_secret")
        self._erase_within_s = load(ErasureSettings).erase_within_s
        digest_key = os.environ.get("WAYBILL_DIGEST_KEY") or kept(options.state / "digest_key")
        self._ports = choose_ports(options.ports, options.state / "service_ports.json", options.gateways)
        self._file = options.state / addresses.FILE
        self._records = _records(options.state)
        self._ready = False
        services = plan(
            stack,
            self._ports,
            gateways=options.gateways,
            secret=self._secret,
            digest_key=digest_key,
            base=os.environ,
        )
        logs = _logs(options.state)
        self._services = [ServicePart(service, logs) for service in services]
        stores = [StorePart(stack, name) for name in STOP_ORDER]
        self._supervisor = Supervisor([*self._services, *stores], changed=self._changed, told=_tell)

    async def run(self) -> bool:
        """Start the services, keep all parts running until a signal, stop the services; whether all ever served.

        Raises what kept them from it.
        """
        stop, hurry = asyncio.Event(), asyncio.Event()
        with self._interrupts.in_loop(stop, hurry):
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._live()),
                        group.create_task(_watch_parent(self._options.parent, stop)),
                    ]
                    await stop.wait()
                    for task in tasks:
                        task.cancel()
            except* EXPECTED as errors:
                raise _first(errors) from None
            finally:
                self._file.unlink(missing_ok=True)
                self._stack.give_up()
                await self._supervisor.stop(hurry)
                self._records.write([])
        return self._ready

    async def _live(self) -> None:
        await migrate_async(self._stack.postgres_url)
        await ensure_topics(
            self._stack.kafka,
            Topics(os.environ.get("WAYBILL_TOPIC_PREFIX") or "waybill"),
            erase_within_s=self._erase_within_s,
        )
        await self._supervisor.start()
        self._ready = True
        self._changed()
        self._show()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._supervisor.keep())
            group.create_task(self._watch_children())

    async def _watch_children(self) -> None:
        """A gateway of several processes starts its own again."""
        before = None
        while True:
            now = [part.pids for part in self._services]
            if now != before:
                self._changed()
            before = now
            await asyncio.sleep(_CHILDREN_POLL_SECONDS)

    def _changed(self) -> None:
        alive = [part for part in self._services if part.alive()]
        self._records.write([Record.of(part.name, part.pid, signal.SIGTERM) for part in alive])
        if self._ready:
            addresses.write(self._file, self._endpoints())

    def _endpoints(self) -> Endpoints:
        pids: dict[str, int | list[int]] = {
            **{part.name: part.pid for part in self._services if part.name == part.service.kind},
            **self._stack.pids,
        }
        gateways = [part for part in self._services if part.service.kind == "gateway"]
        several = len(gateways) > 1
        processes = [pid for part in gateways for pid in part.pids]
        if len(processes) > 1:
            pids["gateway"] = processes
        return Endpoints(
            gateway=public(self._ports, "gateway"),
            ingest=public(self._ports, "ingest"),
            console=public(self._ports, "console"),
            private={kind: private(self._ports, kind) for kind in names(1)},
            postgres=self._stack.postgres_url,
            kafka=self._stack.kafka,
            redis=self._stack.redis,
            auth_secret=self._secret,
            pids=pids,
            gateways=[public(self._ports, part.name) for part in gateways] if several else [],
            gateways_private=[part.service.private for part in gateways] if several else [],
        )

    def _show(self) -> None:
        rows = [("part", "process", "address", "health and metrics")]
        for part in self._services:
            address = public(self._ports, part.name) if part.name in self._ports else ""
            rows.append((part.name, str(part.pid), address, part.service.private))
        stores = {"postgres": self._stack.postgres_url, "kafka": self._stack.kafka, "redis": self._stack.redis}
        rows += [(name, str(self._stack.pids[name]), address, "") for name, address in stores.items()]
        state = self._options.state
        print("Waybill runs.", *_aligned(rows), sep="\n")
        print(f"addresses  {self._file}\nlogs       {_logs(state)}\na token    waybill token ada --state {state}")
        print("Ctrl-C stops all.", flush=True)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    # Plain text, as wide as it is: addresses are there to be copied, also out of a pipe.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def _watch_parent(parent: int | None, stop: asyncio.Event) -> None:
    """Set `stop` once the parent is gone: who started this for its own use may have been killed."""
    while parent is not None and os.getppid() == parent:  # noqa: ASYNC110 - a parent's end sets no event
        await asyncio.sleep(_ORPHAN_POLL_SECONDS)
    if parent is not None:
        stop.set()


def _clear(state: Path) -> None:
    """End the services, and remove the addresses, of a run that was killed. The stack sees to its own servers."""
    with StateLock(state):
        (state / addresses.FILE).unlink(missing_ok=True)
        _records(state).end_leftovers()


def _records(state: Path) -> Records:
    folder = state / "services"
    folder.mkdir(exist_ok=True)
    return Records(folder)


def _logs(state: Path) -> Path:
    folder = state / "logs"
    folder.mkdir(exist_ok=True)
    return folder


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app(prog_name="waybill up")
