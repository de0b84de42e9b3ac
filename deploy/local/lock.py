"""One owner per state folder, and the servers that a killed owner left behind."""

import contextlib
import fcntl
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

LEFTOVER_STOP_SECONDS = 15.0


class StateInUseError(RuntimeError):
    """Another living process owns the state folder."""


class StateLock:
    """A lock on a state folder, held by the kernel: it ends with its owner, so that none can go stale.

    The file keeps the owner's pid only to name it in `StateInUseError`.
    """

    def __init__(self, state: Path) -> None:
        self._path = state / "lock"
        self._file: int | None = None

    def __enter__(self) -> Self:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(file, 32).decode().strip() or "unknown"
            os.close(file)
            raise StateInUseError(f"{self._path.parent} is in use by process {owner}") from None
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()}\n".encode())
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(frozen=True, slots=True)
class Record:
    """A started server as the next owner finds it. A pid alone may be somebody else's by then."""

    name: str
    pid: int
    started: str
    stop_signal: int

    @classmethod
    def of(cls, name: str, pid: int, stop_signal: int) -> "Record":
        """Of a process that runs now."""
        return cls(name, pid, started(pid) or "", stop_signal)

    def alive(self) -> bool:
        """Whether that very process runs, not another one under its pid."""
        return bool(self.started) and started(self.pid) == self.started


class Records:
    """The servers of a state folder in the order in which they are to be stopped, kept in `children.json`."""

    def __init__(self, state: Path) -> None:
        self._path = state / "children.json"

    def write(self, records: list[Record]) -> None:
        """Replace the file as a whole."""
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps([asdict(record) for record in records]))
        draft.replace(self._path)

    def read(self) -> list[Record]:
        """Empty when there is no file."""
        try:
            return [Record(**entry) for entry in json.loads(self._path.read_text())]
        except FileNotFoundError:
            return []

    def end_leftovers(self) -> list[str]:
        """End each recorded server that still lives: ask, wait, kill. Only the lock's holder may call this.

        Returns the names of those that lived.
        """
        ended = []
        for record in self.read():
            if record.alive():
                ended.append(record.name)
                _end(record)
        self.write([])
        return ended


def started(pid: int) -> str | None:
    """Which life of a pid this is: the machine's boot and the clock tick of the start. None if it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name, in brackets, may hold spaces and brackets itself.
    fields = stat.rpartition(")")[2].split()
    state, tick = fields[0], fields[19]
    if state in "ZX":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{tick}"


def _end(record: Record) -> None:
    for number, seconds in ((record.stop_signal, LEFTOVER_STOP_SECONDS), (signal.SIGKILL, LEFTOVER_STOP_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, number)
        deadline = time.monotonic() + seconds
        while record.alive():
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"{record.name} of an earlier run, process {record.pid}, does not end")
