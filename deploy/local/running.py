"""A local stack for the length of a block: for tests, the demo and benchmarks. It runs as a process of its own."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from deploy.local import endpoints
from deploy.local.endpoints import Endpoints

READY_SECONDS = 300.0
"""The first start of a machine downloads Kafka's jars."""
STOP_SECONDS = 120.0
_POLL_SECONDS = 0.05


class NotRunningError(RuntimeError):
    """The stack did not come up; the text is what it said."""


class Running:
    """A stack that is up."""

    def __init__(self, state: Path, process: "subprocess.Popen[bytes]") -> None:
        self.state = state
        self.file = state / endpoints.FILE
        self.process = process

    @property
    def endpoints(self) -> Endpoints:
        """As they are now. Raises `FileNotFoundError` once the stack has ended."""
        return endpoints.read(self.file)

    def stop(self) -> int:
        """Ask the stack to end, wait until it has, and return its exit code; a second call does nothing more."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextlib.contextmanager
def running(
    state: Path,
    *,
    ports: Literal["auto", "fixed"] = "auto",
    gateways: int = 1,
    environment: Mapping[str, str] | None = None,
    ready_seconds: float = READY_SECONDS,
) -> Iterator[Running]:
    """`waybill up` in `state`, from when all serves until the block is left.

    `environment` is added to this process's own, for the services' settings. Blocks while it starts and stops: in an
    event loop enter and leave it by `asyncio.to_thread`. What it says is in `state/up.log`. Raises `NotRunningError`.
    If this process is killed, the stack ends by itself.
    """
    state.mkdir(parents=True, exist_ok=True)
    stale = _version(state / endpoints.FILE)
    options = ["--state", str(state), "--ports", ports, "--gateways", str(gateways), "--parent", str(os.getpid())]
    log = state / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.local.up", *options],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(environment or {})},
            # A terminal's Ctrl-C is ours to pass on, once what uses the stack has ended.
            start_new_session=True,
        )
    stack = Running(state, process)
    try:
        _wait(stack, stale, log, ready_seconds)
        yield stack
    finally:
        stack.stop()


def _version(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _wait(stack: Running, stale: tuple[int, int] | None, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    # The file that a killed run left there stays until the new one is far enough to remove it.
    while _version(stack.file) in (None, stale):
        if stack.process.poll() is not None:
            raise NotRunningError(log.read_text(errors="replace").strip() or "the local stack ended at once")
        if time.monotonic() > deadline:
            raise NotRunningError(f"not ready after {seconds:g} s; see {log}")
        time.sleep(_POLL_SECONDS)
