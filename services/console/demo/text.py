"""What people say in the demo: the lines of a text."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
_MOST_CHARACTERS = 2000


class NoTextError(Exception):
    """There is nothing to say; the message tells why."""


def lines_of(file: Path | None) -> list[str]:
    """The lines that are not blank, of a file or, without one, of the project's own documentation.

    Raises `NoTextError`.
    """
    files = [file] if file is not None else [*sorted((_ROOT / "docs").rglob("*.md")), *sorted(_ROOT.glob("*.md"))]
    found: list[str] = []
    for one in files:
        try:
            text = one.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise NoTextError(f"{one} cannot be read: {error.strerror}") from error
        # NUL has no place in a message; a text file may hold anything.
        found += [line.strip().replace("\0", "")[:_MOST_CHARACTERS] for line in text.splitlines()]
    found = [line for line in found if line]
    if not found:
        raise NoTextError("no text: name a file with --text" if file is None else f"{file} holds no lines")
    return found
