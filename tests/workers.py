"""What a run of several pytest processes divides among them, so that they may share servers and a machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def share(whole: range, environment: Mapping[str, str] = os.environ) -> range:
    """This process's part of some numbers: all of them, or under pytest-xdist as many as each other worker has."""
    number = int(environment.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    count = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    size = len(whole) // count
    if size == 0:
        raise ValueError(f"{len(whole)} numbers do not do for {count} workers")
    return whole[number * size : (number + 1) * size]
