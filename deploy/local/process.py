"""One server as a child process: its log in a file, a bounded start, an orderly stop."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LOG_LIMIT_BYTES = 16 * 1024 * 1024
"""A log larger than this is set aside as `NAME.log.old` before the next start."""

POLL_SECONDS = 0.02


class StartError(RuntimeError):
    """A server did not get ready. The text ends with the last lines of that server's own log."""


@dataclass(frozen=True, slots=True)
class Command:
    """How one server is run, once its folder is prepared."""

    name: str
    argv: Sequence[str]
    folder: Path
    """Working directory; the server's data is below it."""
    log: Path
    ready: bytes
    """Bytes that its log holds once it serves. A probe of the port could meet a stranger's server instead."""
    stop_signal: signal.Signals = signal.SIGTERM
    start_seconds: float = 60.0
    stop_seconds: float = 20.0
    environment: Mapping[str, str] = field(default_factory=dict)
    identity: tuple[int, int] | None = None
    """(uid, gid) to run as; None is the owner's own."""


class Child:
    """A started server in a session of its own: a terminal's Ctrl-C reaches the owner alone, which stops all."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._offset = _make_room(command.log)
        self._popen = _spawn(command, command.argv)
        self.pid = self._popen.pid

    def alive(self) -> bool:
        """Whether it runs; one that has ended is reaped."""
        return self._popen.poll() is None

    def wait_ready(self, cancelled: threading.Event) -> None:
        """Return once the server serves.

        Raises `StartError` when it ends before that, when `start_seconds` have passed, or when `cancelled` is set.
        """
        deadline = time.monotonic() + self.command.start_seconds
        while True:
            # Asked before the log is read: a server that writes its last line and ends in between is seen as ended.
            alive = self.alive()
            if not alive:
                raise self._failure(f"ended with status {self._popen.returncode}")
            if self.command.ready in _read_from(self.command.log, self._offset):
                return
            if cancelled.wait(POLL_SECONDS):
                raise self._failure("start was given up")
            if time.monotonic() > deadline:
                raise self._failure(f"not ready after {self.command.start_seconds:g} s")

    def stop(self) -> None:
        """Ask, wait `stop_seconds`, then kill that pid. Returns when the process is gone."""
        if self.alive():
            self._popen.send_signal(self.command.stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(self.command.stop_seconds)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, if it still runs, and reap."""
        self._popen.kill()
        self._popen.wait()

    def _failure(self, what: str) -> StartError:
        return StartError(_explain(self.command, what, self._offset))


def run_step(command: Command, argv: Sequence[str], *, stdin: bytes = b"") -> None:
    """Run one preparing step of a server to its end, its output in the server's log.

    Raises `StartError` when its status is not 0.
    """
    offset = _make_room(command.log)
    step = _spawn(command, argv, stdin=subprocess.PIPE)
    step.communicate(stdin)
    if step.returncode != 0:
        raise StartError(_explain(command, f"{Path(argv[0]).name} ended with status {step.returncode}", offset))


def tail(log: Path, *, lines: int = 20, offset: int = 0) -> str:
    """The last lines of a log, counted from a byte offset on, without the frames of Java's stack traces."""
    text = _read_from(log, offset).decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if not line.startswith(("\tat ", "\t... "))][-lines:])


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that are still there; a dead one has none."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _spawn(command: Command, argv: Sequence[str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    uid, gid = command.identity or (None, None)
    # Nothing of the caller's environment: PGPORT, CLASSPATH or JAVA_TOOL_OPTIONS would change what runs.
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC", **command.environment}
    with command.log.open("ab") as log:
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=log,
            stderr=log,
            cwd=command.folder,
            env=environment,
            user=uid,
            group=gid,
            extra_groups=None if uid is None else [],
            start_new_session=True,
        )


def _make_room(log: Path) -> int:
    """Set a large log aside; the offset at which the next lines begin."""
    size = log.stat().st_size if log.exists() else 0
    if size <= LOG_LIMIT_BYTES:
        return size
    log.replace(log.with_name(log.name + ".old"))
    return 0


def _read_from(log: Path, offset: int) -> bytes:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read()


def _explain(command: Command, what: str, offset: int) -> str:
    return f"{command.name} did not start: {what}\nlast lines of {command.log}:\n{tail(command.log, offset=offset)}"
