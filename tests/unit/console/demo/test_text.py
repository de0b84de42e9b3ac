from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.console.demo.text import NoTextError, lines_of

if TYPE_CHECKING:
    from pathlib import Path


def test_the_documentation_is_there_without_a_file() -> None:
    assert lines_of(None)


def test_lines_of_any_file_are_fit_for_a_message(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"one\n\n  two\xff\x00  \n" + b"x" * 5000)
    assert lines_of(file) == ["one", "two�", "x" * 2000]


def test_a_file_without_lines_or_without_being_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(NoTextError, match="empty holds no lines"):
        lines_of(tmp_path / "empty")
    with pytest.raises(NoTextError, match="nowhere cannot be read"):
        lines_of(tmp_path / "nowhere")
