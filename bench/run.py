"""`waybill bench NAME`: measure, print, and keep."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import shlex
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import asyncpg
import uvloop
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.table import Table
from websockets.exceptions import WebSocketException

from bench import cells, centrifugo, e2e, gateway, harness, receipts, relay, report, results, send, stage, transitions
from bench.machine import machine, raise_file_limit
from bench.outbox import new_folder
from bench.words import words_on
from deploy.local.process import StartError
from deploy.local.running import NotRunningError
from deploy.local.stack import Stack
from deploy.migrate import MigrationError
from shared.errors import WaybillError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from deploy.local.endpoints import Endpoints

NAMES = ("send", "e2e", "relay", "gateway", "receipts", "transitions")

_EXPECTED = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    ImportError,
    KafkaError,
    MigrationError,
    NotRunningError,
    OSError,
    RuntimeError,
    StartError,
    TimeoutError,
    ValueError,
    WaybillError,
    WebSocketException,
    aiohttp.ClientError,
)
"""What keeps a benchmark from its end; people are told in a line, without a traceback."""

_WHAT = (
    "send: sends per second; e2e: from a send to the other's socket; relay: from the outbox to Kafka; "
    "gateway: from Kafka to many sockets; receipts: from acks to marks, and to the peer's tick; "
    "transitions: what the log of state changes costs"
)

_INTERRUPTED = 130
_MOST_SECONDS = 600
_MOST_RATE = 10_000
_LEAST_POOL = 5
_LEAST_ROWS, _MOST_ROWS = 1_000, 20_000_000


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="waybill bench", description="Measure Waybill and its reference side by side, in turn, in one run."
    )
    made.add_argument("name", choices=NAMES, help=_WHAT)
    made.add_argument("--json", action="store_true", help="end with the result as one line of JSON")
    made.add_argument("--keep", action="store_true", help="keep the result and write docs/performance.md anew")
    made.add_argument("--endpoints", type=Path, help="endpoints.json of a Waybill that runs; default: start one")
    made.add_argument("--rounds", type=_rounds, help="turns of each side (default 3)")
    made.add_argument(
        "--seconds", type=_seconds, help="measured seconds of a turn (send 8, e2e 12, relay 12, gateway 15, receipts 8)"
    )
    made.add_argument(
        "--rate", type=_rate, help="messages per second of e2e (default 50), acks per second of receipts (500)"
    )
    made.add_argument("--pool", type=_pool, default=8, help="connections to Postgres of each side (8)")
    of_relay = made.add_argument_group("relay", "on stores of its own; --seconds is for each of its rates")
    of_relay.add_argument("--backlog", type=_rows, help="rows to drain in a turn (200000)")
    of_relay.add_argument("--deep", type=_rows, help="then Waybill drains so many in one go; its memory is watched")
    of_gateway = made.add_argument_group("gateway", "on stores of its own; Go builds the load client and the peer")
    of_gateway.add_argument("--cells", type=_cells, help=f"which cells, with commas ({','.join(cells.ALL)})")
    of_gateway.add_argument("--scale", type=_scale, help="share of each cell's connections, to try it out (1)")
    of_receipts = made.add_argument_group("receipts", "on stores of its own")
    of_receipts.add_argument("--parts", type=_parts, help=f"which parts, with commas ({','.join(receipts.PARTS)})")
    of_receipts.add_argument("--mixes", type=_mixes, help=f"which mixes of acks ({','.join(receipts.MIXES)})")
    of_receipts.add_argument("--messages", type=_rows, help="messages that the growth is extrapolated from (6000)")
    of_receipts.add_argument("--acks", type=_rows, help="acks to drain in a turn (200000)")
    of_both = made.add_argument_group("relay, gateway and receipts")
    folders = f"relay {harness.FOLDER}, gateway {centrifugo.FOLDER}; receipts has none"
    of_both.add_argument("--peer", type=Path, help=f"folder of the peer's harness (default {folders})")
    of_both.add_argument("--alone", action="store_true", help="measure Waybill without the peer")
    of_both.add_argument(
        "--profile", type=Path, help="folder for a profile of each process of Waybill's gateway, or receipts"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; 0 only if it came to its end."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    command = shlex.join(["waybill", "bench", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        if options.name == "relay":
            measured = _measure_relay(options)
        elif options.name == "gateway":
            measured = _measure_gateway(options)
        elif options.name == "receipts":
            measured = _measure_receipts(options)
        elif options.name == "transitions":
            measured = _measure_transitions(options)
        else:
            with stage.waybill(options.endpoints, pool=options.pool) as of:
                measured = uvloop.run(_measure(of, options))
    except _EXPECTED as error:
        print(f"waybill bench: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    except BaseExceptionGroup as errors:
        print(f"waybill bench: {_reason(errors)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    date = datetime.now(UTC).isoformat(timespec="seconds")
    result = {**measured, "machine": machine(), "date": date, "command": command}
    wrong = cells.told(cells.errors_of(measured))
    if options.keep and not wrong:
        results.keep(result)
        report.write()
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        show(result, Console())
    for line in wrong:
        print(f"waybill bench: ERRORS: {line}", file=sys.stderr)
    return 1 if wrong else 0


async def _measure(of: Endpoints, options: argparse.Namespace) -> dict[str, object]:
    asked = {"rounds": options.rounds, "measure_s": options.seconds}
    given = {name: value for name, value in asked.items() if value is not None}
    if options.name == "send":
        return await send.measure(of, dataclasses.replace(send.Settings(pool=options.pool), **given))
    if options.rate is not None:
        given["rate_s"] = options.rate
    return await e2e.measure(of, dataclasses.replace(e2e.Settings(pool=options.pool), **given))


def _measure_relay(options: argparse.Namespace) -> dict[str, object]:
    names = ("rounds", "seconds", "backlog", "deep", "peer", "alone")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    with new_folder() as name:
        folder = Path(name)
        stage.say("starting Postgres and Kafka")
        with Stack(folder / "state") as stack:
            return uvloop.run(relay.measure(stack, folder, relay.Settings(**given)))


def _measure_gateway(options: argparse.Namespace) -> dict[str, object]:
    names = ("rounds", "seconds", "cells", "scale", "peer", "alone", "profile")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    settings = gateway.Settings(**given)
    limit, needed = raise_file_limit(), cells.files_needed(settings.cells, settings.scale)
    if limit < needed:
        raise RuntimeError(f"these cells need {needed} open files, and {limit} are allowed: raise `ulimit -Hn`")
    with _interrupted_by_termination(), new_folder() as name:
        folder = Path(name)
        uvloop.run(gateway.build(folder, settings))
        stage.say("starting Postgres, Kafka and Valkey")
        with Stack(folder / "state") as stack:
            return uvloop.run(gateway.measure(stack, folder, settings))


def _measure_receipts(options: argparse.Namespace) -> dict[str, object]:
    names = ("rounds", "seconds", "rate", "parts", "mixes", "acks", "messages", "alone", "profile")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    with _interrupted_by_termination(), new_folder() as name:
        folder = Path(name)
        stage.say("starting Postgres, Kafka and Valkey")
        with Stack(folder / "state") as stack:
            return uvloop.run(receipts.measure(stack, folder, receipts.Settings(**given)))


def _measure_transitions(options: argparse.Namespace) -> dict[str, object]:
    asked = {"rounds": options.rounds, "measure_s": options.seconds, "rate_s": options.rate}
    given = {name: value for name, value in asked.items() if value is not None}
    return transitions.measure(transitions.Settings(pool=options.pool, **given))


@contextlib.contextmanager
def _interrupted_by_termination() -> Iterator[None]:
    """While the block runs, a SIGTERM ends it as Ctrl-C does: what was started is stopped."""
    handlers = {
        # A shell starts what runs in the background with SIGINT ignored.
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: lambda *_: signal.raise_signal(signal.SIGINT),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show(result: Mapping[str, object], console: Console) -> None:
    """The result as a person reads it."""
    table = Table(title=f"waybill bench {result['name']}", title_justify="left")
    for heading in report.headings(result):
        table.add_column(heading, justify="right" if heading else "left")
    for row in report.rows(result):
        table.add_row(*row)
    console.print(table)
    for word in words_on(result):
        console.print(f"- {word}", highlight=False)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"must be above 0, and at most {_MOST_SECONDS}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 1 <= value <= _MOST_RATE:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MOST_RATE}")
    return value


def _rounds(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _rows(text: str) -> int:
    value = int(text)
    if not _LEAST_ROWS <= value <= _MOST_ROWS:
        raise argparse.ArgumentTypeError(f"must be from {_LEAST_ROWS} to {_MOST_ROWS}")
    return value


def _cells(text: str) -> tuple[str, ...]:
    try:
        return cells.chosen(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parts(text: str) -> tuple[str, ...]:
    return _some(text, receipts.PARTS)


def _mixes(text: str) -> tuple[str, ...]:
    return _some(text, receipts.MIXES)


def _some(text: str, of: Collection[str]) -> tuple[str, ...]:
    asked = text.split(",")
    if not set(asked) <= set(of):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(of)}")
    return tuple(one for one in of if one in asked)


def _scale(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0, and at most 1")
    return value


def _pool(text: str) -> int:
    value = int(text)
    if value < _LEAST_POOL:
        raise argparse.ArgumentTypeError(f"must be at least {_LEAST_POOL}: ingest has 4 lanes and its readers")
    return value


def _reason(errors: BaseExceptionGroup[BaseException]) -> str:
    first = errors.exceptions[0]
    return _reason(first) if isinstance(first, BaseExceptionGroup) else str(first) or type(first).__name__


if __name__ == "__main__":
    sys.exit(main())
