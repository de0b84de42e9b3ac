import asyncio
from pathlib import Path
from typing import Any

import pytest

from bench import backlog, harness, relay
from bench.figures import ratio


def measured(**changes: Any) -> dict[str, Any]:
    """What the harness says of a relay."""

    def part(rows: int, cpu_s: float, **more: Any) -> dict[str, Any]:
        used = {"relay": cpu_s, "postgres": {"load": 9.0, "relay": 0.5, "background": 9.0}, "broker": 9.0}
        return {"rows": rows, "cpu_s": used, "relay_rss_mib": 80, **more}

    def rate(rows: int, cpu_s: float, p50: float) -> dict[str, Any]:
        return part(rows, cpu_s, latency_ms={"p50": p50, "p99": p50 * 3, "max": 50.0, "min": 0.1})

    drain = part(200_000, 1.5, rows_per_s=120_000, second_half_rows_per_s=125_000, start_to_first_s=0.7)
    return {
        "relay": "A relay",
        "drain": {**drain, "relay_rss_mib": 95},
        "steady": [rate(12_000, 2.5, 4.5), rate(60_000, 5.5, 5.0)],
        "idle": part(0, 0.2, seconds=10, relay_percent_of_core=2.0),
        "correct": {"rows": 272_000, "lost": 0, "doubled": 3, "out_of_order": 0},
        **changes,
    }


def test_figures_count_postgres_share_for_the_relay_and_nothing_else_of_it() -> None:
    found = relay.figures(measured())
    assert found["cpu_s_per_million"] == 10.0
    assert found["cpu_s_per_million_at_1000"] == 250.0
    assert found["cpu_s_per_million_at_5000"] == 100.0
    assert found["idle_cpu"] == 7.0
    assert found["idle_cpu_process"] == 2.0


def test_figures_are_those_of_the_protocol_and_further_ones() -> None:
    found = relay.figures(measured())
    assert set(relay.COMPARED) | set(relay.FURTHER) <= found.keys()
    assert (found["drain_rows_s"], found["p50_ms"], found["p99_ms"]) == (120_000, 4.5, 13.5)
    assert (found["p50_ms_at_5000"], found["rss_mb"], found["doubled"]) == (5.0, 95, 3)


def test_where_postgres_can_not_be_watched_the_process_alone_counts() -> None:
    found = measured()
    for part in (found["drain"], *found["steady"], found["idle"]):
        part["cpu_s"]["postgres"] = None
    assert relay.figures(found)["cpu_s_per_million"] == 7.5


@pytest.mark.parametrize("wrong", ["lost", "out_of_order"])
def test_a_relay_that_loses_or_disorders_rows_has_no_figures(wrong: str) -> None:
    verdict = {"rows": 10, "lost": 0, "doubled": 0, "out_of_order": 0, wrong: 1}
    with pytest.raises(RuntimeError, match="A relay: "):
        relay.figures(measured(correct=verdict))


def test_more_drained_is_better_and_less_of_anything_else() -> None:
    better = ratio({"drain_rows_s": 100.0, "cpu_s_per_million": 5.0}, {"drain_rows_s": 25.0, "cpu_s_per_million": 50.0})
    assert better == {"drain_rows_s": 4.0, "cpu_s_per_million": 10.0}


def test_a_harness_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "measure.py").touch()
    with pytest.raises(FileNotFoundError, match=r"stack.py, peer.py missing.*--peer"):
        harness.load(tmp_path)


def test_a_harness_is_loaded_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "measure_of_test.py").write_text("def measure(): ...")
    (tmp_path / "stack_of_test.py").write_text("")
    (tmp_path / "peer_of_test.py").write_text("from measure_of_test import measure\nclass Debezium: ...")
    monkeypatch.setattr(harness, "MODULES", ("measure_of_test", "stack_of_test", "peer_of_test"))
    loaded = harness.load(tmp_path)
    assert loaded.measure.__module__ == "measure_of_test"
    assert loaded.peer.__module__ == "peer_of_test"


def test_alone_a_backlog_is_drained_where_there_is_no_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[int] = []

    async def drain(_: object, rows: int) -> dict[str, float]:
        drained.append(rows)
        return {"rows": rows}

    class Stack:
        postgres_url = "postgres://waybill@127.0.0.1/waybill"
        kafka = "127.0.0.1:1"

    monkeypatch.setattr(backlog, "drain", drain)
    stack: Any = Stack()
    settings = relay.Settings(peer=tmp_path, alone=True, backlog=5_000, deep=9_000)
    found = asyncio.run(relay.measure(stack, tmp_path, settings))
    assert drained == [5_000, 9_000]
    assert (found["waybill"], found["deep"]) == ({"rows": 5_000}, {"rows": 9_000})
    with pytest.raises(FileNotFoundError):
        asyncio.run(relay.measure(stack, tmp_path, relay.Settings(peer=tmp_path)))


def test_memory_over_time_is_told_by_its_first_and_last_quarter() -> None:
    told = backlog.over_time([50.0, 90.0, 90.0, 91.0, 99.0, 92.0, 92.0, 92.0])
    assert told == {"rss_first_mb": 70.0, "rss_last_mb": 92.0, "rss_mb": 99.0}
    assert backlog.over_time([80.0])["rss_last_mb"] == 80.0


def test_memory_is_read_from_the_status_of_a_process() -> None:
    assert backlog.rss_mb("Name:\tpython\nVmRSS:\t   92160 kB\nThreads:\t1\n") == 90.0
    with pytest.raises(ValueError, match="ended"):
        backlog.rss_mb("Name:\tpython\nState:\tZ (zombie)\n")
