"""The gateway's process under cProfile: `python -m bench.profiled FILE` writes FILE.pstats and FILE.txt at its end.

The profiler costs about as much as what it watches: shares can be trusted, figures cannot.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
from pathlib import Path

from services.gateway.main import main

_LINES = 60


def run(file: Path) -> None:
    """Serve until SIGTERM, then write what took the time: to be read by `pstats`, and the first lines as text."""
    profile = cProfile.Profile()
    try:
        profile.runcall(main)
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        profile.dump_stats(file.with_suffix(".pstats"))
        with file.with_suffix(".txt").open("w", encoding="utf-8") as out:
            stats = pstats.Stats(profile, stream=out)
            for order in ("tottime", "cumulative"):
                stats.sort_stats(order).print_stats(_LINES)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
