"""A standby of a Postgres of the local stack."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.local import postgres
from deploy.local.process import Child, Command, run_step

if TYPE_CHECKING:
    from collections.abc import Iterator


def copied(primary: Command, url: str, home: Path) -> None:
    """Make a folder for a standby of that server; below the server's own, since it has to be its user's."""
    place = next(number for number, part in enumerate(primary.argv) if Path(part).name == "postgres")
    program = str(Path(primary.argv[place]).with_name("pg_basebackup"))
    options = ["-d", url.partition("?")[0], "-D", str(home / "data"), "-R", "-X", "stream", "-c", "fast"]
    run_step(primary, [*primary.argv[:place], program, *options])


@contextmanager
def standby(home: Path, log: Path, port: int, *, alone: bool = False) -> Iterator[Child]:
    """Runs in a folder that was `copied`. ``alone``: it looks for no primary."""
    command = postgres.prepare(home, log, port)
    argv = [*command.argv, *(("-c", "primary_conninfo=") if alone else ())]
    server = Child(replace(command, argv=argv, ready=b"ready to accept read-only connections"))
    try:
        server.wait_ready(threading.Event())
        yield server
    finally:
        server.stop()
