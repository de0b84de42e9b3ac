import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import report, run, stage, transitions
from bench.transitions import FIGURES, PARTS, Settings
from bench.words import words_on
from deploy.local.endpoints import Endpoints

ENDPOINTS = Endpoints(
    gateway="http://g", ingest="http://i", console="http://c", private={}, postgres="", kafka="", redis="",
    auth_secret="s", pids={},
)  # fmt: skip


def test_turns_take_turns_on_a_waybill_each_and_the_difference_is_the_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []

    @contextlib.contextmanager
    def waybill(file: Path | None, *, pool: int, environment: dict[str, str]) -> Iterator[Endpoints]:
        started.append((file, pool, environment))
        yield ENDPOINTS

    async def on(_: Endpoints, settings: Settings, *, logs: bool) -> dict[str, float]:
        started.append((settings.rate_s, settings.measure_s))
        costs = {
            **dict.fromkeys(FIGURES, 100.0 + len(started)),
            "log_bytes": 800.0,
            "rows_sent": 1.0,
            "rows_pushed": 2.0,
        }
        return costs if logs else {**dict.fromkeys(FIGURES, 50.0), "log_bytes": 300.0}

    monkeypatch.setattr(stage, "waybill", waybill)
    monkeypatch.setattr(transitions, "_on", on)
    assert run.main(["transitions", "--json", "--rounds", "2", "--seconds", "3", "--rate", "70", "--pool", "6"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    log = "WAYBILL_TRANSITION_LOG"
    assert started == [
        one for _ in range(2) for value in ("true", "false") for one in ((None, 6, {log: value}), (70, 3))
    ]
    assert result["waybill"]["cpu_us"] == 104.0
    assert (result["cost"]["cpu_us"], result["cost"]["log_bytes"]) == (54.0, 500.0)
    assert [row[0] for row in report.rows(result)] == ["With the log", "Without", "The log costs"]
    assert len(report.headings(result)) == len(FIGURES) + 1 == len(PARTS) + 6
    said = " ".join(words_on(result))
    assert "70 messages a second" in said
    assert "Rows per message: `sent` 1, `pushed` 2." in said
    assert "(300 bytes a message)" in said
