"""Results as people read them: a table, a few honest words, and `docs/performance.md` from what is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from bench import cells, receipts, relay, results, transitions
from bench.words import as_times, at, words_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    Result = Mapping[str, object]
    Row = tuple[str, ...]

FILE = Path(__file__).parent.parent / "docs" / "performance.md"

_HEADINGS = {
    "rate_s": "sends/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "unsent_at_end": "not yet in Kafka at the end",
    "disordered": "out of order",
    "repeated": "twice",
    "drain_rows_s": "drain, rows/s",
    "cpu_s_per_million": "CPU s per 1 M, drain",
    "rss_mb": "MiB",
    "idle_cpu": "idle, % of a core",
    "p50_ms_at_5000": "p50 ms at 5,000/s",
    "p99_ms_at_5000": "p99 ms at 5,000/s",
    "cpu_s_per_million_at_1000": "CPU s per 1 M at 1,000/s",
    "cpu_s_per_million_at_5000": "CPU s per 1 M at 5,000/s",
    "a_cpu_us": "a: CPU µs per delivery",
    "a_p99_ms": "a: p99 ms",
    "b_cpu_us": "b: CPU µs per delivery",
    "b_p99_ms": "b: p99 ms",
    "c_deliveries_s": "c: deliveries/s",
    "c_cpu_us": "c: CPU µs per delivery",
    "d_kib_per_session": "d: KiB per session",
    "e_seconds": "e: seconds",
    "e_cpu_us": "e: CPU µs per session",
    "rate_s_wide": "acks/s, nothing to fold",
    "cpu_s_per_million_wide": "CPU s per 1 M, nothing to fold",
    "cpu_us": "CPU µs per message",
    **{f"{part}_cpu_us": f"{part}, µs" for part in transitions.PARTS},
    "log_bytes": "bytes in the log per message",
    "log_rows": "rows",
}

_HEADINGS_OF = {"receipts": {"rate_s": "acks/s", "cpu_s_per_million": "CPU s per 1 M"}}
"""Where a figure means something else."""

_FINE = frozenset({"c_cpu_us", "e_seconds"})
"""Figures that are told to the hundredth where they are small."""


class _Line(NamedTuple):
    """A row: its label, where its figures are, and whether they are ratios."""

    label: str
    path: tuple[str, ...]
    times: bool = False


_TABLES: dict[str, tuple[tuple[str, ...], tuple[_Line, ...]]] = {
    "send": (
        ("rate_s", "p50_ms", "p99_ms", "unsent_at_end"),
        (
            _Line("Batches over HTTP, as the gateway makes them: Waybill", ("waybill",)),
            _Line("– reference, scan every 3 s", ("peer",)),
            _Line("– Waybill is better by", ("ratio",), times=True),
            _Line("– reference, pushed after the commit", ("peer_after_commit",)),
            _Line("– reference, scan, the transaction in one statement", ("peer_at_once",)),
            _Line("– Waybill is better by", ("ratio_at_once",), times=True),
            _Line("The writer alone, in process: Waybill", ("writer_only", "waybill")),
            _Line("– reference", ("writer_only", "peer")),
            _Line("– Waybill is better by", ("writer_only", "ratio"), times=True),
            _Line("– reference, the transaction in one statement", ("writer_only", "peer_at_once")),
            _Line("– Waybill is better by", ("writer_only", "ratio_at_once"), times=True),
            _Line("One send per HTTP request: Waybill", ("single_requests", "waybill")),
            _Line("– reference", ("single_requests", "peer")),
            _Line("– Waybill is better by", ("single_requests", "ratio"), times=True),
        ),
    ),
    "e2e": (
        ("p50_ms", "p99_ms", "disordered", "repeated"),
        (
            _Line("Waybill: send written → event read at the other socket", ("waybill",)),
            _Line("Reference, scan every 3 s: commit → Kafka consumer", ("peer",)),
            _Line("– Waybill is better by", ("ratio",), times=True),
            _Line("Reference, pushed after the commit: commit → Kafka consumer", ("peer_after_commit",)),
            _Line("– Waybill is better by", ("ratio_after_commit",), times=True),
        ),
    ),
    "relay": (
        (*relay.COMPARED, *relay.FURTHER),
        (
            _Line("Waybill", ("waybill",)),
            _Line("Debezium", ("peer",)),
            _Line("– Waybill is better by", ("ratio",), times=True),
            _Line("Debezium, tuned for latency", ("peer_tuned",)),
            _Line("– Waybill is better by", ("ratio_tuned",), times=True),
            _Line("Waybill, a long backlog", ("deep",)),
        ),
    ),
    "gateway": (
        (*cells.COMPARED, *cells.FURTHER),
        (
            _Line("Waybill", ("waybill",)),
            _Line("Centrifugo's library", ("peer",)),
            _Line("– Waybill is better by", ("ratio",), times=True),
        ),
    ),
    "receipts": (
        (*receipts.COMPARED, *receipts.FURTHER),
        (
            _Line("Waybill", ("waybill",)),
            _Line("One upsert per ack", ("peer",)),
            _Line("– Waybill is better by", ("ratio",), times=True),
            _Line("One upsert per ack, eight at a time", ("peer_parallel",)),
            _Line("– Waybill is better by", ("ratio_parallel",), times=True),
        ),
    ),
    "transitions": (
        transitions.FIGURES,
        (
            _Line("With the log", ("waybill",)),
            _Line("Without", ("without",)),
            _Line("The log costs", ("cost",)),
        ),
    ),
}

_TITLES = {
    "send": "Sends per second on one connection budget (`send`)",
    "e2e": "From a send to the other member's socket (`e2e`)",
    "relay": "From the outbox to Kafka (`relay`)",
    "gateway": "From Kafka to many sockets (`gateway`)",
    "receipts": "From acks to marks, and to the peer's tick (`receipts`)",
    "transitions": "What the log of state changes costs (`transitions`)",
}

_HEAD = """\
# Performance

Written by `python -m bench.report` from the kept results in `bench/results`; `waybill bench NAME --keep` measures
anew. Each benchmark measures Waybill and a reference in turn in the same run, on the same Postgres and Kafka, and tells
the medians of the turns. Absolute figures belong to the machine; the ratios travel better.

The reference of `send` and `e2e` (`bench/reference/seed_outbox.py`) is the plain outbox that Waybill replaces: one
transaction per message, an outbox table with a status column and a composite index, a dispatcher that claims batches
of 100 by `FOR UPDATE SKIP LOCKED`. It is tuned within its design; what was tuned stands at the top of that file. It
checks neither membership nor rights nor the body, all of which Waybill does. The peer of `relay` is Debezium, that of
`gateway` the library that Centrifugo is made of, that of `receipts` a consumer that writes one upsert per ack
(`bench/reference/plain_acks.py`).
"""


def headings(result: Result) -> Row:
    """The table's column headings; the first is empty."""
    names, _ = _table(result)
    own = {**_HEADINGS, **_HEADINGS_OF.get(str(result["name"]), {})}
    return ("", *(own.get(name, name) for name in names))


def rows(result: Result) -> list[Row]:
    """The table's rows, a label and a cell per figure; what was not measured is left empty."""
    names, lines = _table(result)
    found: list[Row] = []
    for line in lines:
        figures = at(result, *line.path)
        if figures:
            found.append((line.label, *(_cell(name, figures.get(name), times=line.times) for name in names)))
    return found


def markdown(kept: list[dict[str, object]]) -> str:
    """The text of `docs/performance.md`."""
    parts = [_HEAD]
    for result in kept:
        name = str(result["name"])
        grid = [headings(result), ("---", *("---:" for _ in headings(result)[1:])), *rows(result)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in grid)
        notes = "\n".join(f"- {word}" for word in words_on(result))
        parts.append(f"## {_TITLES.get(name, name)}\n\n{_origin(result)}\n\n{table}\n\n{notes}\n")
    return "\n".join(parts)


def write(folder: Path = results.FOLDER, file: Path = FILE) -> None:
    """Write the file anew from what is kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(markdown(results.kept(folder)), encoding="utf-8")


def _origin(result: Result) -> str:
    machine = cast("Mapping[str, object]", result["machine"])
    return (
        f"{str(result['date'])[:10]}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}: `{result['command']}`."
    )


def _table(result: Result) -> tuple[tuple[str, ...], tuple[_Line, ...]]:
    name = str(result["name"])
    if name in _TABLES:
        names, lines = _TABLES[name]
        measured = {figure for line in lines for figure in at(result, *line.path)}
        return tuple(figure for figure in names if figure in measured), lines
    lines = (_Line("Waybill", ("waybill",)), _Line("peer", ("peer",)), _Line("better by", ("ratio",), times=True))
    return tuple(at(result, "ratio")), lines


def _cell(name: str, value: float | None, *, times: bool) -> str:
    if value is None:
        return ""
    if times:
        return as_times(value)
    if name in _FINE and value < 10:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


if __name__ == "__main__":
    try:
        write()
    except (OSError, ValueError) as error:
        print(f"bench.report: {error}", file=sys.stderr)
        sys.exit(1)
