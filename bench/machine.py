"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

Machine = dict[str, str | int | float]


def machine() -> Machine:
    """CPU model, cores that this process may use, memory in GiB, system and Python."""
    return {
        "cpu": cpu_model(_text("/proc/cpuinfo")) or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def cpu_model(cpuinfo: str) -> str | None:
    """The model's name in the text of `/proc/cpuinfo`."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return None


def raise_file_limit() -> int:
    """Let this process, and those that it starts, open as many files as it may; returns how many."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
