from __future__ import annotations

import json
from typing import get_args

import pytest

from services.console.demo.command import finish
from services.console.demo.damage import FIGURE_OF, Damage, spoil
from services.console.demo.recording import Recording
from services.console.demo.verdict import FIGURES
from tests.unit.console.demo.stories import outcome

pytestmark = pytest.mark.promise("protocol.9.demo")


@pytest.mark.parametrize("kind", get_args(Damage))
def test_each_damage_is_reported_under_its_figure_alone_with_exit_code_1(
    kind: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finish(outcome(), kind, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert {name: said[name] for name in FIGURES if said[name]} == {FIGURE_OF[kind]: 1}


def test_every_figure_has_a_damage() -> None:
    assert sorted(FIGURE_OF.values()) == sorted(FIGURES)
    assert set(FIGURE_OF) == set(get_args(Damage))


def test_without_damage_the_exit_code_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert finish(outcome(), None, as_json=True) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", get_args(Damage))
def test_nothing_to_damage_is_an_error_not_a_pass(kind: Damage) -> None:
    with pytest.raises(ValueError, match=kind):
        spoil([Recording("ada", "ada-phone")], kind)
