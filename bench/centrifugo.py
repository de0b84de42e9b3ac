"""The load client of gateways, and the peer: both lie outside of this repository, in a folder, and are built by Go.

`load` speaks to either gateway and prints one line of JSON; `centrifuge-server` is a chat gateway on the library that
Centrifugo is made of, and reads the same Kafka records.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from deploy.local.ports import HOST, free_port

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Sequence

    from bench.cells import Answer

FOLDER = Path(__file__).parent.parent.parent / "shared" / "peers" / "gateway"

LOAD, SERVER = "load", "centrifuge-server"

_BUILD_S = 900.0
"""The first build fetches its modules."""
_LOAD_S = 600.0
_READY_S = 30.0
_STOP_S = 20.0
_TAIL = 2_000


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway that the load client is to measure. ``server`` and ``known``: process ids; see `run`."""

    flags: Sequence[str]
    server: Sequence[int]
    known: Sequence[int]


class Programs:
    """What was built. ``folder`` also takes their logs; ``common`` are flags that every run of the load client has."""

    def __init__(self, folder: Path, kafka: str, topic: str, secret: str) -> None:
        self._folder = folder
        self._where = ["-brokers", kafka, "-topic", topic, "-secret", secret]

    async def load(self, label: str, target: Target, flags: Sequence[str]) -> Answer:
        """Run the load client. Raises `RuntimeError` with what it said if it did not come to its end.

        CPU of the target's ``server`` is counted as the server's; that of ``known`` processes is told apart from that
        of strangers, which would be a disturbance.
        """
        log = self._folder / f"{LOAD}.log"
        begin = log.stat().st_size if log.exists() else 0
        pids = ["-server-pid", _list(target.server), "-broker-pid", _list(target.known)]
        with log.open("ab") as said:
            process = await asyncio.create_subprocess_exec(
                self._folder / LOAD,
                *self._where,
                *pids,
                *target.flags,
                *flags,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=said,
            )
        try:
            async with asyncio.timeout(_LOAD_S):
                out, _ = await process.communicate()
        finally:
            await _end(process)
        if process.returncode:
            raise RuntimeError(f"{label}: {_tail(log, begin) or f'the load client ended with {process.returncode}'}")
        return cast("Answer", json.loads(out))

    @contextlib.asynccontextmanager
    async def peer(self, known: Sequence[int]) -> AsyncIterator[Target]:
        """A fresh server of the peer while the block runs. Raises `RuntimeError` if it does not start."""
        port = free_port()
        log = self._folder / f"{SERVER}.log"
        with log.open("ab") as said:
            process = await asyncio.create_subprocess_exec(
                self._folder / SERVER,
                *self._where,
                "-listen",
                f"{HOST}:{port}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=said,
            )
        try:
            out = cast("asyncio.StreamReader", process.stdout)
            async with asyncio.timeout(_READY_S):
                ready = await out.readline()
            if ready != b"ready\n":
                raise RuntimeError(f"the peer's server did not start: {_tail(log, 0)}")
            flags = ["-proto", "centrifugo", "-url", f"ws://{HOST}:{port}/connection/websocket"]
            yield Target(flags, [process.pid], known)
        finally:
            await _end(process)


async def build(folder: Path, into: Path, *, peer: bool) -> None:
    """Build the load client, and the peer's server if asked for, into a folder.

    Raises `FileNotFoundError` if the sources or Go are not there, `RuntimeError` with what Go says if it cannot.
    """
    names = [LOAD, SERVER] if peer else [LOAD]
    missing = [name for name in names if not (folder / name / "main.go").is_file()]
    if missing:
        raise FileNotFoundError(
            f"the load client and its peer are not in {folder} ({', '.join(missing)} missing): name their folder by "
            "--peer; without them no gateway is measured"
        )
    go = shutil.which("go")
    if go is None:
        raise FileNotFoundError(
            "Go is not installed (no `go` in PATH): the load client is built by it, and without it no gateway, "
            "Waybill's neither, is measured"
        )
    process = await asyncio.create_subprocess_exec(
        go,
        "build",
        "-o",
        f"{into}/",
        *(f"./{name}" for name in names),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_BUILD_S):
            _, said = await process.communicate()
    finally:
        await _end(process)
    if process.returncode:
        raise RuntimeError(f"Go could not build the load client: {said.decode(errors='replace')[-_TAIL:]}")


async def _end(process: Process) -> None:
    """Ask it to end, and kill it if it does not."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _list(pids: Sequence[int]) -> str:
    return ",".join(map(str, pids))


def _tail(log: Path, begin: int) -> str:
    return log.read_bytes()[begin:].decode(errors="replace").strip()[-_TAIL:]
