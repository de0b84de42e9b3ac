"""What a WebSocket connection costs a server, by transport: `python -m bench.transports`.

One server process at a time, with nothing in it but the transport; this process is its client, with plain sockets.
Measured is the CPU time of the server process (user and system), and how its resident memory grows.

`picows` is no dependency of this project. To have it measured too, install it and uvloop anywhere else and name that
Python: `python -m venv FOLDER`, `FOLDER/bin/pip install picows uvloop`, `--picows FOLDER/bin/python`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.transports_server import PAYLOAD, ROUND_S

if TYPE_CHECKING:
    from collections.abc import Iterator

_REQUEST = (
    b"GET /v1/socket HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"User-Agent: bench\r\nAuthorization: Bearer " + b"x" * 200 + b"\r\n\r\n"
)
_ACK = b'{"t":"ack","conversation_id":"0190f3f2-7c1e-7b6a-8a51-1b1b1b1b1b1b","ranges":[[1,4]]}'
_MASKED_ACK = bytes((0x81, 0x80 | len(_ACK))) + bytes(4) + _ACK
_FRAME_BYTES = 4 + len(PAYLOAD)
_WARM_UP = 50
_REST_S = 0.2
_TIMEOUT_S = 60.0


class Costs(NamedTuple):
    """Of one transport; CPU in µs."""

    handshake: float
    idle_kib: float
    alone: float
    """A frame that is written alone."""
    four: float
    """One of four that are written in one turn of the loop."""
    ack: float
    """A message that comes alone."""


class _Server:
    """A server process, and connections to it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port = int(self._line()["port"])
        self.sockets: list[socket.socket] = []

    def ask(self, **asked: object) -> dict[str, float]:
        """One question, one answer."""
        self.tell(**asked)
        return self._line()

    def tell(self, **asked: object) -> None:
        """A question; its answer is read by `answer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def _line(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the server has ended")
        found: dict[str, float] = json.loads(line)
        return found

    def connect(self, count: int) -> None:
        """Open more connections, one after the other."""
        for _ in range(count):
            made = socket.create_connection(("127.0.0.1", self.port), _TIMEOUT_S)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.sendall(_REQUEST)
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += made.recv(4096)
            assert head.startswith(b"HTTP/1.1 101")
            self.sockets.append(made)

    def written(self, rounds: int, frames: int) -> float:
        """CPU µs for each frame, of so many to each connection in each round."""
        self.tell(do="write", rounds=rounds, frames=frames)
        missing = rounds * frames * _FRAME_BYTES * len(self.sockets)
        with selectors.DefaultSelector() as ready:
            for each in self.sockets:
                ready.register(each, selectors.EVENT_READ)
            while missing > 0:
                for key, _ in ready.select(_TIMEOUT_S):
                    assert isinstance(key.fileobj, socket.socket)
                    missing -= len(key.fileobj.recv(1 << 16))
        return self._line()["cpu"] * 1e6 / (rounds * frames * len(self.sockets))

    def heard(self, rounds: int) -> float:
        """CPU µs for each message, of one from each connection in each round."""
        before = self.ask(do="state")
        for _ in range(rounds):
            begin = time.monotonic()
            for each in self.sockets:
                each.sendall(_MASKED_ACK)
            time.sleep(max(0.0, ROUND_S - (time.monotonic() - begin)))
        wanted = rounds * len(self.sockets)
        while (after := self.ask(do="state"))["heard"] - before["heard"] < wanted:
            time.sleep(ROUND_S)
        return (after["cpu"] - before["cpu"]) * 1e6 / wanted


@contextlib.contextmanager
def _server(python: str, name: str) -> Iterator[_Server]:
    command = [python, "-m", "bench.transports_server", name]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        made = _Server(process)
        try:
            yield made
        finally:
            for each in made.sockets:
                each.close()
            process.kill()


def measure(python: str, name: str, *, idle: int, busy: int, rounds: int) -> Costs:
    """One turn of a transport: ``idle`` connections are opened, to ``busy`` others frames go."""
    with _server(python, name) as server:
        server.connect(busy)
        server.written(_WARM_UP, 1)
        alone, four = server.written(rounds, 1), server.written(rounds, 4)
        ack = server.heard(rounds)
        before = server.ask(do="state")
        server.connect(idle)
        time.sleep(_REST_S)
        after = server.ask(do="state")
        assert after["open"] == idle + busy
        return Costs(
            handshake=(after["cpu"] - before["cpu"]) * 1e6 / idle,
            idle_kib=(after["rss"] - before["rss"]) / 1024 / idle,
            alone=alone,
            four=four,
            ack=ack,
        )


def main() -> None:
    """Measure each transport in turn, several times, and print the medians."""
    options = argparse.ArgumentParser(prog="python -m bench.transports", description="What a transport costs a server.")
    options.add_argument("--picows", metavar="PYTHON", help="a Python that has picows and uvloop")
    options.add_argument("--turns", type=int, default=3, help="turns of each (3)")
    options.add_argument("--idle", type=int, default=4000, help="idle connections (4000)")
    options.add_argument("--busy", type=int, default=200, help="connections that frames go to (200)")
    options.add_argument("--rounds", type=int, default=200, help="rounds of frames (200)")
    given = options.parse_args()
    pythons = {"wire": sys.executable, "websockets": sys.executable}
    if given.picows:
        pythons["picows"] = given.picows
    turns: dict[str, list[Costs]] = {name: [] for name in pythons}
    for _ in range(given.turns):
        for name, python in pythons.items():
            turns[name].append(measure(python, name, idle=given.idle, busy=given.busy, rounds=given.rounds))
    table = Table("", "handshake, µs", "idle, KiB", "frame, µs", "of four, µs", "message in, µs")
    for name, costs in turns.items():
        medians = (statistics.median(each) for each in zip(*costs, strict=True))
        table.add_row(name, *(f"{figure:.1f}" for figure in medians))
    Console().print(table)


if __name__ == "__main__":
    main()
