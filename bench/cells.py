"""The cells of `waybill bench gateway`: what the load client is asked for, and what its answer comes to. Pure.

a to e are the peer's own cells, the same for both sides; `send` and `stalled` are Waybill's alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bench.figures import Figures

    Answer = Mapping[str, object]
    """The line that the load client prints."""

Errors = dict[str, int]
"""By what went wrong; empty if nothing did."""

_SPARE_FILES = 300

_COUNTED = ("order_errors", "gaps", "duplicates", "connections_lost", "produce_failed")


@dataclass(frozen=True, slots=True)
class Cell:
    """One load. Every connection is a user on one device, and a member of one conversation.

    ``rate``: messages per second over all conversations. ``via``: where Waybill's messages are published; the peer's
    always go straight to Kafka. ``stretch``: measured seconds as a multiple of what was asked for.
    """

    mode: Literal["fanout", "flood", "idle", "reconnect", "send"]
    conversations: int
    members: int
    rate: float | None = None
    via: Literal["kafka", "ingest"] = "kafka"
    stretch: float = 1.0
    more: tuple[str, ...] = ()

    @property
    def connections(self) -> int:
        """All of them, each in one conversation."""
        return self.conversations * self.members

    @property
    def shadowed(self) -> bool:
        """Whether events come to Kafka that nobody wrote into Postgres: see `bench/shadow.py`."""
        return self.via == "kafka" and self.mode != "idle"

    def scaled(self, scale: float) -> Cell:
        """The same with this share of the connections: of one conversation's members, else of the conversations."""
        if self.conversations == 1:
            members, conversations = max(2, round(self.members * scale)), 1
        else:
            members, conversations = self.members, max(1, round(self.conversations * scale))
        rate = self.rate and self.rate * conversations / self.conversations
        return Cell(self.mode, conversations, members, rate, self.via, self.stretch, self.more)

    def flags(self, seconds: float) -> list[str]:
        """What the load client is told of it."""
        found = ["-mode", self.mode, "-n", self.connections, "-convs", self.conversations, "-members", self.members]
        if self.rate is not None:
            found += ["-rate", f"{self.rate:g}"]
        return [*map(str, found), "-dur", f"{seconds * self.stretch:g}s", *self.more]


CELLS: dict[str, Cell] = {
    "a": Cell("fanout", 1, 500, rate=100),
    "b": Cell("fanout", 200, 5, rate=2_000),
    # The load client keeps at most half of the window that the server tells ahead of what has arrived.
    "c": Cell("flood", 1, 500),
    "d": Cell("idle", 2_000, 5, stretch=2, more=("-settle", "20s")),
    "e": Cell("reconnect", 1_000, 5, via="ingest", more=("-missed", "10", "-dial-parallel", "0", "-drain", "60s")),
    "send": Cell("send", 200, 5, rate=1_000, via="ingest"),
}

WARM_UP = Cell("fanout", 10, 5, rate=1_000)
"""For the broker's sake, before anything is measured."""

STALLED = "stalled"
BOTH = ("a", "b", "c", "d", "e")
ALL = (*CELLS, STALLED)

_OF_PROTOCOL: dict[str, tuple[tuple[str, str], ...]] = {
    "a": (("a_cpu_us", "server_cpu_us_per_delivery"), ("a_p99_ms", "latency_ms.p99")),
    "b": (("b_cpu_us", "server_cpu_us_per_delivery"), ("b_p99_ms", "latency_ms.p99")),
    "c": (("c_deliveries_s", "deliveries_per_s"), ("c_cpu_us", "server_cpu_us_per_delivery")),
    "d": (("d_kib_per_session", "server_rss_kib_per_connection"),),
    "e": (("e_seconds", "reconnect_s"),),
}
_FURTHER: dict[str, tuple[tuple[str, str], ...]] = {
    "e": (("e_cpu_us", "server_cpu_us_per_reconnect"),),
    "send": (("send_p50_ms", "latency_ms.p50"), ("send_p99_ms", "latency_ms.p99"), ("sent_p99_ms", "sent_ms.p99")),
}
_DETAIL: dict[str, tuple[tuple[str, str], ...]] = {
    "fanout": (
        ("p50_ms", "latency_ms.p50"),
        ("max_ms", "latency_ms.max"),
        ("deliveries_s", "deliveries_per_s"),
        ("rss_kib", "server_rss_kib_after"),
    ),
    "flood": (("p99_ms", "latency_ms.p99"), ("published_s", "published_per_s"), ("rss_kib", "server_rss_kib_after")),
    "idle": (("connect_s", "connect_s"), ("rss_kib", "server_rss_kib_connected")),
    "reconnect": (("p50_ms", "recovered_ms.p50"), ("connect_s", "connect_s")),
    "send": (("cpu_us", "server_cpu_us_per_delivery"), ("deliveries_s", "deliveries_per_s")),
}

COMPARED = tuple(name for pairs in _OF_PROTOCOL.values() for name, _ in pairs)
"""What the protocol names."""

FURTHER = ("e_cpu_us",)
"""What else both sides have."""


def chosen(text: str) -> tuple[str, ...]:
    """The cells of a list with commas, in their own order. Raises `ValueError` for one that there is not."""
    asked = {name.strip() for name in text.split(",")}
    if unknown := asked - set(ALL):
        raise ValueError(f"no cell {min(unknown)!r}: there are {', '.join(ALL)}")
    return tuple(name for name in ALL if name in asked)


def files_needed(names: Iterable[str], scale: float) -> int:
    """How many files a process has to be able to open for these cells."""
    return max((CELLS[name].scaled(scale).connections for name in names if name in CELLS), default=0) + _SPARE_FILES


def figures(name: str, answer: Answer) -> Figures:
    """What a cell is judged by."""
    return {figure: _number(answer, path) for figure, path in (*_OF_PROTOCOL.get(name, ()), *_FURTHER.get(name, ()))}


def details(name: str, answer: Answer) -> Figures:
    """What helps to understand a turn.

    Cores are those of the server, of the load client, of what is known beside them (the broker, Waybill's other
    services, this process), and of everything else.
    """
    window = _number(answer, "window_s") or 1.0
    cores = {
        f"{name}_{of}_cores": round(_number(answer, f"{field}_cpu_s") / window, 2)
        for of, field in (("server", "server"), ("client", "client"), ("known", "broker"), ("other", "other"))
    }
    found = {f"{name}_{figure}": _number(answer, path) for figure, path in _DETAIL[str(answer["mode"])]}
    return found | cores


def errors(answer: Answer) -> Errors:
    """Everything that must not happen."""
    found = {name: int(_number(answer, name)) for name in _COUNTED}
    found["not_delivered"] = int(_number(answer, "expected_deliveries") - _number(answer, "deliveries"))
    found |= cast("Mapping[str, int]", answer.get("problems") or {})
    return {name: count for name, count in found.items() if count}


def added(one: Errors, other: Errors) -> Errors:
    """Errors of both."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def errors_of(result: Mapping[str, object]) -> Mapping[str, Mapping[str, Errors]]:
    """A result's errors by side and cell; a benchmark that counts none has none."""
    return cast("Mapping[str, Mapping[str, Errors]]", result.get("errors") or {})


def told(wrong: Mapping[str, Mapping[str, Errors]]) -> list[str]:
    """Errors by side and cell, a line each."""
    return [
        f"{side}, {cell}: {', '.join(f'{count:,} {name}' for name, count in of.items())}"
        for side, cells in wrong.items()
        for cell, of in cells.items()
    ]


def total(metrics: str, name: str) -> float:
    """The sum over a metric's samples in the text that a service's `/metrics` answers. Raises `ValueError` for none."""
    found = [line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    if not found:
        raise ValueError(f"no metric {name}")
    return sum(float(line.rpartition(" ")[2]) for line in found)


def without_reads(reads: float, sessions: int) -> float:
    """The share of sessions that cost no read of their own, if no session cost two."""
    return round(max(0.0, 1 - reads / sessions), 3)


def added_kib(with_them: float, without: float, clients: int) -> float:
    """What a client adds to memory, in KiB, of two memories in KiB; not below 0."""
    return round(max(0.0, (with_them - without) / clients), 1)


def merged(parts: Iterable[Figures]) -> Figures:
    """One turn's figures out of those of its cells."""
    return {name: value for part in parts for name, value in part.items()}


def _number(answer: Answer, path: str) -> float:
    # The load client leaves out what is 0.
    found: object = answer
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return float(cast("float", found or 0.0))
