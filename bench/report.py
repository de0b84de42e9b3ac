"""Results as people read them: a table, a few honest words, and `docs/performance.md` from what is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from bench import results

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
}


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
}

_TITLES = {
    "send": "Sends per second on one connection budget (`send`)",
    "e2e": "From a send to the other member's socket (`e2e`)",
}

_HEAD = """\
# Performance

Written by `python -m bench.report` from the kept results in `bench/results`; `waybill bench NAME --keep` measures
anew. Each benchmark measures Waybill and a reference in turn in the same run, on the same Postgres and Kafka, and tells
the medians of the turns. Absolute figures belong to the machine; the ratios travel better.

The reference (`bench/reference/seed_outbox.py`) is the plain outbox that Waybill replaces: one transaction per message,
an outbox table with a status column and a composite index, a dispatcher that claims batches of 100 by
`FOR UPDATE SKIP LOCKED`. It is tuned within its design; what was tuned stands at the top of that file. It checks neither
membership nor rights nor the body, all of which Waybill does.
"""


def headings(result: Result) -> Row:
    """The table's column headings; the first is empty."""
    names, _ = _table(result)
    return ("", *(_HEADINGS.get(name, name) for name in names))


def rows(result: Result) -> list[Row]:
    """The table's rows, a label and a cell per figure; what was not measured is left empty."""
    names, lines = _table(result)
    found: list[Row] = []
    for line in lines:
        figures = _at(result, *line.path)
        if figures:
            found.append((line.label, *(_cell(figures.get(name), times=line.times) for name in names)))
    return found


def words(result: Result) -> list[str]:
    """What to know about these figures, a sentence or two each."""
    match result["name"]:
        case "send":
            return _words_on_send(result)
        case "e2e":
            return _words_on_e2e(result)
    return []


def markdown(kept: list[dict[str, object]]) -> str:
    """The text of `docs/performance.md`."""
    parts = [_HEAD]
    for result in kept:
        name = str(result["name"])
        cells = [headings(result), ("---", *("---:" for _ in headings(result)[1:])), *rows(result)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
        notes = "\n".join(f"- {word}" for word in words(result))
        parts.append(f"## {_TITLES.get(name, name)}\n\n{_origin(result)}\n\n{table}\n\n{notes}\n")
    return "\n".join(parts)


def write(folder: Path = results.FOLDER, file: Path = FILE) -> None:
    """Write the file anew from what is kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(markdown(results.kept(folder)), encoding="utf-8")


def _words_on_send(result: Result) -> list[str]:
    settings = _at(result, "settings")
    at_once, single = _at(result, "ratio_at_once"), _at(result, "single_requests", "ratio")
    scan, waybill = _at(result, "peer"), _at(result, "waybill")
    return [
        f"{settings['in_flight'] * settings['batch']:,.0f} sends wait for their answer at any time, on both sides, over "
        f"{settings['chats']:.0f} conversations: {settings['in_flight']:.0f} requests of {settings['batch']:.0f}, which "
        "is how a busy gateway forwards. At a full load the latencies follow from the rates. What each side does to "
        "deliver goes on meanwhile, on the same cores.",
        f"Both have {settings['pool']:.0f} connections. Waybill's ingest writes through 4 of them and keeps the others "
        "for reads; the reference writes through all but the dispatcher's 2.",
        "The reference is measured as such code is written: begin, number, message, outbox row, commit. Folded into one "
        f"statement it saves four of five round trips, and Waybill's lead is {_times(at_once.get('rate_s'))} in place of "
        f"{_times(_at(result, 'ratio').get('rate_s'))}: the rest is the price of a commit and an index update for each "
        "row instead of for each batch.",
        f"When every send is a request of its own, HTTP in Python costs more than either writer: Waybill's rate is then "
        f"{_times(single.get('rate_s'))} the reference's. The gateway's batches are what group commit lives on.",
        f"Written is not delivered: when the time was over, {waybill['unsent_at_end']:,.0f} of Waybill's events and "
        f"{scan['unsent_at_end']:,.0f} of the reference's were not yet in Kafka.",
    ]


def _words_on_e2e(result: Result) -> list[str]:
    settings, waybill, push = _at(result, "settings"), _at(result, "waybill"), _at(result, "peer_after_commit")
    return [
        f"{settings['rate_s']:.0f} messages a second in an open loop over {settings['chats']:.0f} conversations of "
        f"{settings['users']:.0f} users. Waybill is measured from socket to socket through every service. The reference "
        "is measured in its best case, within one process from its commit to a Kafka consumer: no socket, no HTTP, no "
        "gateway.",
        "With the scan alone the time is that of the scan: any moment within 3 s.",
        f"**The after-commit push, honestly.** While nothing fails it has no scan to wait for: p50 {push['p50_ms']:.1f} ms "
        f"and p99 {push['p99_ms']:.1f} ms from its commit to Kafka. The part of Waybill's way that is like it, from "
        f"`sent` read to `event` read, took p50 {waybill['sent_to_event_p50_ms']:.1f} ms and p99 "
        f"{waybill['sent_to_event_p99_ms']:.1f} ms, gateway and socket included. Speed is no reason to prefer Waybill's "
        "relay to it. What it does not have is order: two pushes overtake each other, a failed one waits for the scan "
        "while later ones go out; a process that dies between commit and push leaves the message to the scan, seconds "
        "later, behind its successors; and each message costs one more update of the hot table.",
        f"In a turn of the push, {push['disordered']:.0f} messages came to Kafka behind a later one of their "
        f"conversation and {push['repeated']:.0f} came twice; at Waybill's sockets {waybill['disordered']:.0f} and "
        f"{waybill['repeated']:.0f}.",
    ]


def _origin(result: Result) -> str:
    machine = cast("Mapping[str, object]", result["machine"])
    return (
        f"{str(result['date'])[:10]}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}: `{result['command']}`."
    )


def _table(result: Result) -> tuple[tuple[str, ...], tuple[_Line, ...]]:
    name = str(result["name"])
    if name in _TABLES:
        return _TABLES[name]
    lines = (_Line("Waybill", ("waybill",)), _Line("peer", ("peer",)), _Line("better by", ("ratio",), times=True))
    return tuple(_at(result, "ratio")), lines


def _at(result: Result, *path: str) -> dict[str, float]:
    found: object = result
    for name in path:
        found = found.get(name, {}) if isinstance(found, dict) else {}
    return cast("dict[str, float]", found)


def _cell(value: float | None, *, times: bool) -> str:
    if value is None:
        return ""
    return _times(value) if times else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


def _times(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f} ×" if value >= 100 else f"{value:.1f} ×"


if __name__ == "__main__":
    try:
        write()
    except (OSError, ValueError) as error:
        print(f"bench.report: {error}", file=sys.stderr)
        sys.exit(1)
