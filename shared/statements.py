"""Named SQL: ``x.sql`` lies beside the ``x.py`` that runs it, each statement under a line ``-- name: …``."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"^-- name: ([a-z_]+)\s*$", re.MULTILINE)


def statements(module_file: str) -> dict[str, str]:
    """The statements of the ``.sql`` file beside a module, by name.

    Call it at import with ``__file__`` and look names up there too, so that a missing one stops the start.
    Raises `ValueError` for text before the first name or a name given twice.
    """
    path = Path(module_file).with_suffix(".sql")
    head, *parts = _NAME.split(path.read_text(encoding="utf-8"))
    if head.strip():
        raise ValueError(f"{path.name}: text before the first name")
    named: dict[str, str] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in named:
            raise ValueError(f"{path.name}: {name} is there twice")
        named[name] = f"-- {name}\n{body.strip()}"
    return named
