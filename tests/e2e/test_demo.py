from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

from deploy.local.running import Running, running
from services.console.demo.command import finish
from services.console.demo.damage import FIGURE_OF, Damage
from services.console.demo.play import Outcome, Play
from services.console.demo.report import report
from services.console.demo.script import KILLS
from services.console.demo.text import lines_of
from services.console.demo.verdict import FIGURES

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.promise("protocol.9.demo"), pytest.mark.timeout(400), pytest.mark.long(80)]

WAYBILL = Path(sys.executable).with_name("waybill")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("stack")
    with running(folder) as found:
        yield found


@pytest.fixture(scope="module")
def outcome(stack: Running) -> Outcome:
    """One real run, to be damaged by each test on a copy."""
    return asyncio.run(Play(stack.file, lines_of(None), 300, 100).play())


@pytest.mark.promise("I1", "I6", "I7", "I8")
def test_everything_dies_once_and_nothing_is_lost(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    assert finish(copy.deepcopy(outcome), None, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert {name: said[name] for name in FIGURES} == dict.fromkeys(FIGURES, 0)
    assert said["sent"] == said["acked"] == 300
    assert said["recovery_s"] == pytest.approx(max(kill.recovery_s or 0 for kill in outcome.kills), abs=0.001)
    assert [kill.part for kill in outcome.kills] == [part for _, part in KILLS]
    assert all(kill.in_flight > 0 for kill in outcome.kills)


def test_every_device_displayed_what_is_there_for_its_user(outcome: Outcome) -> None:
    assert len(outcome.recordings) == 12
    for recording in outcome.recordings:
        shown = [(one.conversation_id, one.seq, one.event_id) for one in recording.shown]
        assert sorted(shown) == sorted(outcome.truth.expected(recording.user_id))
        assert recording.ticks
    assert report(outcome).p50_ms is not None


@pytest.mark.parametrize("kind", get_args(Damage))
def test_each_damage_of_a_real_run_is_found_and_fails(
    outcome: Outcome, kind: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finish(copy.deepcopy(outcome), kind, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert {name: said[name] for name in FIGURES if said[name]} == {FIGURE_OF[kind]: 1}


def test_the_command_starts_its_own_stack_and_ends_with_one_line(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("\n".join(f"line {number}" for number in range(40)))
    done = subprocess.run(
        [WAYBILL, "demo", "--messages", "600", "--text", text, "--json"],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    said = json.loads(done.stdout)
    assert said["sent"] == said["acked"] == 600
    assert {name: said[name] for name in FIGURES} == dict.fromkeys(FIGURES, 0)
    assert 0 < said["p50_ms"] <= said["p99_ms"]
    assert said["recovery_s"] > 0
    assert "sent" in done.stderr


def test_a_text_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    command = [WAYBILL, "demo", "--text", tmp_path / "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("waybill demo: ")
