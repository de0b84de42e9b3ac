"""Postgres, Kafka and Valkey in one state folder, started together and stopped in order."""

import json
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Self

from deploy.local import jars, kafka, ports, postgres, valkey
from deploy.local.lock import Record, Records, StateLock
from deploy.local.process import Child, Command

STOP_ORDER = ("kafka", "redis", "postgres")
"""What holds no truth goes first, so that nothing writes to a store that is already gone."""


class Stack:
    """Three servers as children of this process, on loopback, with their data, logs and ports in `state`.

    A context manager: entering starts all three side by side and returns when each serves; leaving, by whatever way,
    stops them in `STOP_ORDER`. A second start in the same folder ends what a killed owner left running, and resumes
    with its data. `ports` is `auto` (the folder's earlier ports, else free ones) or a mapping from `ports.NAMES` to
    numbers. Names of servers are `postgres`, `kafka`, `redis`.

    Entering raises `StateInUseError` when another process owns the folder, and `StartError` when a server does not
    start; then none is left running. A SIGTERM to the owner is the owner's to turn into leaving.
    """

    def __init__(self, state: Path, *, ports: Literal["auto"] | Mapping[str, int] = "auto") -> None:
        self.state = state.absolute()
        self.ports: dict[str, int] = {}
        self._wanted = ports
        self._children: dict[str, Child] = {}
        self._records = Records(self.state)
        self._mutex = threading.Lock()
        self._cancelled = threading.Event()
        self._exit = ExitStack()

    @property
    def postgres_url(self) -> str:
        """The owner's address, `postgres://…`."""
        return postgres.url(self.ports["postgres"])

    @property
    def kafka(self) -> str:
        """The broker as `host:port`."""
        return kafka.bootstrap(self.ports["kafka"])

    @property
    def redis(self) -> str:
        """The first database, `redis://…`."""
        return valkey.url(self.ports["redis"])

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each server, its last one if it is dead."""
        return {name: child.pid for name, child in self._children.items()}

    def alive(self, name: str) -> bool:
        """Whether the server runs."""
        return self._children[name].alive()

    def log(self, name: str) -> Path:
        """The file that holds a server's own log."""
        return self.state / f"{name}.log"

    def restart(self, name: str) -> None:
        """Start a server again on its port with its data; one that still runs is stopped first.

        Blocks until it serves. Raises `StartError`; the server is then dead, and may be restarted once more.
        """
        self._children[name].stop()
        self._launch(name)

    def give_up(self) -> None:
        """Make a `restart` under way in another thread end soon, with `StartError`: all is about to be stopped."""
        self._cancelled.set()

    def __enter__(self) -> Self:
        self.state.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            undo.enter_context(StateLock(self.state))
            self._records.end_leftovers()
            self.ports = self._choose_ports()
            undo.callback(self._stop_all)
            self._start_all()
            self._exit = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _choose_ports(self) -> dict[str, int]:
        file = self.state / "ports.json"
        chosen = ports.choose(self._wanted, json.loads(file.read_text()) if file.exists() else {})
        file.write_text(json.dumps(chosen))
        return chosen

    def _start_all(self) -> None:
        self._cancelled.clear()
        with ThreadPoolExecutor(len(STOP_ORDER)) as pool:
            try:
                starts = [pool.submit(self._launch, name) for name in STOP_ORDER]
                done, _ = wait(starts, return_when=FIRST_EXCEPTION)
                for start in done:
                    start.result()
            except BaseException:
                self._cancelled.set()
                raise

    def _launch(self, name: str) -> None:
        command = self._prepare(name)
        with self._mutex:
            child = self._children[name] = Child(command)
            self._record()
        child.wait_ready(self._cancelled)

    def _prepare(self, name: str) -> Command:
        home, log = self.state / name, self.log(name)
        match name:
            case "postgres":
                return postgres.prepare(home, log, self.ports["postgres"])
            case "redis":
                return valkey.prepare(home, log, self.ports["redis"])
            case "kafka":
                cache = jars.cache_folder(fallback=self.state / "cache")
                return kafka.prepare(home, log, self.ports["kafka"], self.ports["kafka_controller"], cache)
        raise ValueError(f"unknown server {name!r}")

    def _stop_all(self) -> None:
        hurry = False
        for name in STOP_ORDER:
            child = self._children.get(name)
            if child is None:
                continue
            try:
                if not hurry:
                    child.stop()
            except KeyboardInterrupt:
                # A second Ctrl-C while one of them takes its time. Killed servers keep what they have acknowledged.
                hurry = True
            child.kill()
        self._record()

    def _record(self) -> None:
        live = [(name, child) for name in STOP_ORDER if (child := self._children.get(name)) and child.alive()]
        self._records.write([Record.of(name, child.pid, child.command.stop_signal) for name, child in live])
