"""A service's process under cProfile: `python -m bench.profiled FILE MODULE` writes FILE.pstats, FILE.txt at its end.

MODULE has a `main`; without it the gateway's is run.

The profiler costs about as much as what it watches: shares can be trusted, figures cannot.
"""

from __future__ import annotations

import cProfile
import importlib
import pstats
import sys
from pathlib import Path

_GATEWAY = "services.gateway.main"
_LINES = 60


def run(file: Path, module: str = _GATEWAY) -> None:
    """Serve until SIGTERM, then write what took the time: to be read by `pstats`, and the first lines as text."""
    main = importlib.import_module(module).main
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
    run(Path(sys.argv[1]), *sys.argv[2:])
