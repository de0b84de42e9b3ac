"""The manifest of promises and the tests' claims agree, both ways."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.promises import PROMISES

TESTS = Path(__file__).parents[1]


def _is_promise_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "promise"


def claims(source: str) -> set[str]:
    """The promises that a test module claims, on tests, classes or the whole module."""
    return {
        argument.value
        for node in ast.walk(ast.parse(source))
        if _is_promise_mark(node) and isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


@cache
def all_claims() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in claims(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(str(path.relative_to(TESTS)))
    return found


def test_a_claim_names_a_known_promise() -> None:
    unknown = {name: where for name, where in all_claims().items() if name not in PROMISES}
    assert unknown == {}


@pytest.mark.parametrize("name", PROMISES)
def test_a_promise_has_a_test_or_a_reason(name: str) -> None:
    claimed = name in all_claims()
    if PROMISES[name].later is None:
        assert claimed, f"no test claims {name}: {PROMISES[name].text}"
    else:
        assert not claimed, f"{name} is claimed by a test: it is kept now, so take its reason away"


def test_a_mark_is_found_on_functions_classes_and_modules() -> None:
    source = """
pytestmark = pytest.mark.promise("I1")
@pytest.mark.promise("I2", "I3")
def test_x(): ...
@pytest.mark.promise("I4")
class TestY: ...
"""
    assert claims(source) == {"I1", "I2", "I3", "I4"}
