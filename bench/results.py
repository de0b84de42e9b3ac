"""Kept results: one JSON file per benchmark, the newest that somebody chose to keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = Path(__file__).parent / "results"

ORDER = ("send", "e2e", "relay", "gateway", "receipts", "transitions")
"""In which the report tells them; others come behind, by name."""


def keep(result: Mapping[str, object], folder: Path = FOLDER) -> Path:
    """Write a result over the earlier one of its name. Returns the file."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{result['name']}.json"
    file.write_text(json.dumps(result, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return file


def kept(folder: Path = FOLDER) -> list[dict[str, object]]:
    """Every kept result. Raises `ValueError` for a file that is none."""
    found: list[dict[str, object]] = []
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(result, dict) or result.get("name") != file.stem:
            raise ValueError(f"{file} is not the result of a benchmark")
        found.append(result)
    return sorted(found, key=lambda result: (_place(str(result["name"])), str(result["name"])))


def _place(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)
