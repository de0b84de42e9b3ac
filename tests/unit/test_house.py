"""What the repository promises those who work on it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("shared", "services", "deploy", "bench", "tests", "clients/python")
CHECKED_BY_MYPY = ("shared", "services", "deploy", "bench", "clients/python")

EXCEPTION = re.compile(r"#\s*(?:noqa|type: ignore|pragma: no cover)\b.*")
WITH_A_REASON = re.compile(r"#\s*(?:noqa: [A-Z0-9, ]+ --? \S|type: ignore\[[a-z, -]+\]  # \S|pragma: no cover - \S)")


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(phony[1].split())


def exceptions(folder: str, kind: str) -> list[str]:
    """The exceptions of a kind below a folder that say no reason."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            match = EXCEPTION.search(line)
            if match and kind in match[0] and not WITH_A_REASON.match(match[0]) and path != Path(__file__):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    return found


@pytest.mark.parametrize("folder", CODE)
def test_every_lint_exception_says_why(folder: str) -> None:
    assert exceptions(folder, "noqa") == []


@pytest.mark.parametrize("folder", CHECKED_BY_MYPY)
def test_every_type_exception_says_why(folder: str) -> None:
    assert exceptions(folder, "type: ignore") == []


def test_every_exception_of_the_whole_house_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ignored = re.search(r"^ignore = \[\n(.*?)^\]$", text, re.MULTILINE | re.DOTALL)
    per_file = re.search(r"^\[tool\.ruff\.lint\.per-file-ignores\]\n(.*?)^\[", text, re.MULTILINE | re.DOTALL)
    assert ignored is not None
    assert per_file is not None
    rules = [line for line in (ignored[1] + per_file[1]).splitlines() if re.match(r"\s+\"[A-Z]", line)]
    lint = tomllib.loads(text)["tool"]["ruff"]["lint"]
    assert len(rules) == len(lint["ignore"]) + sum(map(len, lint["per-file-ignores"].values()))
    assert [line for line in rules if not re.search(r"\",?\s+# \S", line)] == []


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("clients/python/*.md")]
    assert len(documents) > 10
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-bootstrap.lock"])
def test_locks_pin_every_package_by_hash_and_name_no_address(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip()]
    assert lines
    assert [
        line for line in lines if not re.match(r"[a-z0-9.-]+(\[[a-z,-]+\])?==\S+ .*--hash=sha256:[0-9a-f]{64}", line)
    ] == []
    assert "://" not in text
