"""What the demo says at its end: one line for programs, a table for people, an exit code. Pure but for printing."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from services.console.demo.timing import Flight, flights, outside, percentile
from services.console.demo.verdict import FIGURES, Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.console.demo.faults import Kill
    from services.console.demo.play import Outcome

_MEANINGS = {
    "lost": "committed and visible, but a device never displayed it",
    "duplicated": "a device displayed it twice",
    "disordered": "displayed below a higher one",
    "gaps": "a session jumped over it",
    "regressions": "a tick went back",
}


@dataclass(frozen=True, slots=True)
class Report:
    """Milliseconds and seconds; None where nothing was measured. ``quiet``: messages that no fault fell into."""

    sent: int
    acked: int
    verdict: Verdict
    p50_ms: float | None
    p99_ms: float | None
    quiet_p50_ms: float | None
    quiet_p99_ms: float | None
    recovery_s: float | None
    kills: Sequence[Kill]
    displays: int
    devices: int
    seconds: float
    unfinished: Sequence[str]

    @property
    def code(self) -> int:
        """0 if every promise was kept and the story came to its end, else 1."""
        return 0 if self.verdict.good and self.sent == self.acked and not self.unfinished else 1


def report(outcome: Outcome) -> Report:
    """Judge and measure a run."""
    found = flights(outcome.recordings)
    quiet = outside(found, [kill.window for kill in outcome.kills])
    recoveries = [kill.recovery_s for kill in outcome.kills]
    known = [seconds for seconds in recoveries if seconds is not None]
    return Report(
        sent=outcome.sent,
        acked=outcome.acked,
        verdict=judge(outcome.truth, outcome.recordings),
        p50_ms=_ms(found, 0.5),
        p99_ms=_ms(found, 0.99),
        quiet_p50_ms=_ms(quiet, 0.5),
        quiet_p99_ms=_ms(quiet, 0.99),
        recovery_s=round(max(known), 3) if known and len(known) == len(recoveries) else None,
        kills=outcome.kills,
        displays=sum(len(recording.shown) for recording in outcome.recordings),
        devices=len(outcome.recordings),
        seconds=outcome.seconds,
        unfinished=outcome.unfinished,
    )


def line(found: Report) -> str:
    """The line for programs."""
    return json.dumps(
        {
            "sent": found.sent,
            "acked": found.acked,
            **found.verdict.figures(),
            "p50_ms": found.p50_ms,
            "p99_ms": found.p99_ms,
            "recovery_s": found.recovery_s,
        }
    )


def tell(found: Report, *, as_json: bool) -> int:
    """Print the line or the table to standard output, what went wrong to standard error; the exit code."""
    if as_json:
        print(line(found))
    else:
        Console().print(_table(found))
    for note in (*found.unfinished, *found.verdict.notes):
        print(note, file=sys.stderr)
    return found.code


def _table(found: Report) -> Table:
    table = Table(title="Waybill demo", title_justify="left", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("figure", justify="right", no_wrap=True)
    table.add_column("meaning")
    table.add_row("sent", f"{found.sent:,}", f"in {found.seconds:.0f} s, kills included")
    table.add_row("acked", f"{found.acked:,}", "the server said: committed")
    table.add_row("displayed", f"{found.displays:,}", f"events on {found.devices} devices")
    table.add_section()
    for name in FIGURES:
        count = getattr(found.verdict, name)
        table.add_row(name, f"[{'red' if count else 'green'}]{count}[/]", _MEANINGS[name])
    if found.verdict.strangers:
        table.add_row("strangers", f"[red]{found.verdict.strangers}[/]", "displayed, but not so in Postgres")
    table.add_section()
    table.add_row("p50", _text(found.p50_ms, "ms"), "from `send` written to `event` read")
    table.add_row("p99", _text(found.p99_ms, "ms"), "the kills included")
    table.add_row("p50, no fault", _text(found.quiet_p50_ms, "ms"), "messages that no kill fell into")
    table.add_row("p99, no fault", _text(found.quiet_p99_ms, "ms"), "")
    table.add_section()
    for kill in found.kills:
        what = "ticks" if kill.part == "receipts" else "messages"
        table.add_row(
            f"{kill.part} killed",
            _text(kill.recovery_s, "s"),
            f"until messages flowed, {kill.in_flight} {what} were under way",
        )
    table.add_row("recovery", _text(found.recovery_s, "s"), "the worst of them")
    table.add_section()
    table.add_row("verdict", "[green]kept[/]" if found.code == 0 else "[red]broken[/]", "")
    return table


def _ms(found: Iterable[Flight], share: float) -> float | None:
    value = percentile((one.read - one.written for one in found), share)
    return None if value is None else round(value * 1000, 2)


def _text(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:,.2f} {unit}"
