from __future__ import annotations

import json
from dataclasses import replace

import pytest

from services.console.demo.faults import Kill
from services.console.demo.report import line, report, tell
from tests.unit.console.demo.stories import outcome

pytestmark = pytest.mark.promise("protocol.9.demo")


def test_the_line_has_these_ten_fields_in_this_order() -> None:
    assert list(json.loads(line(report(outcome())))) == [
        "sent",
        "acked",
        "lost",
        "duplicated",
        "disordered",
        "gaps",
        "regressions",
        "p50_ms",
        "p99_ms",
        "recovery_s",
    ]


def test_the_worst_recovery_is_told() -> None:
    assert report(outcome()).recovery_s == 2.25


def test_a_part_that_never_recovered_leaves_no_recovery_and_fails() -> None:
    run = outcome()
    run.kills.append(Kill("ingest", 3, 50.0, 4, None))
    run.unfinished.append("no message arrived after the kill of ingest")
    found = report(run)
    assert found.recovery_s is None
    assert found.code == 1


def test_a_send_without_an_answer_fails() -> None:
    run = outcome()
    run.acked -= 1
    assert report(run).code == 1


def test_strangers_fail_though_no_figure_of_the_line_shows_them() -> None:
    run = outcome()
    run.recordings[0].shown.append(replace(run.recordings[0].shown[-1], seq=99, event_id="event-nowhere"))
    assert report(run).code == 1


def test_the_table_is_for_people_and_faults_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    run = outcome()
    del run.recordings[0].shown[2]
    assert tell(report(run), as_json=False) == 1
    said = capsys.readouterr()
    assert "broken" in said.out
    assert "relay killed" in said.out
    assert "was never displayed on ada-phone" in said.err


def test_the_table_says_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(report(outcome()), as_json=False) == 0
    assert "kept" in capsys.readouterr().out
