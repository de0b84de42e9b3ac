"""The harness that measures relays, and the peer in it: both lie outside of this repository, in a folder.

Its `measure.measure` drives any relay that has the methods of `Relay`; its `peer.Debezium` is one.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import asyncpg

FOLDER = Path(__file__).parent.parent.parent / "shared" / "peers" / "debezium"

MODULES = ("measure", "stack", "peer")


class Row(Protocol):
    """A row that the harness wants written."""

    @property
    def id(self) -> UUID:
        """Of the row."""

    @property
    def conversation(self) -> str:
        """Its conversation's id."""

    @property
    def seq(self) -> int:
        """Its place there."""

    @property
    def payload(self) -> str:
        """What is to arrive."""


class Relay(Protocol):
    """A relay as the harness drives it. `insert` is one committed transaction; `pids` are its running processes."""

    name: str
    settings: dict[str, object]

    async def prepare(self, db: asyncpg.Connection) -> None:
        """Make what it needs, and drop what an earlier run left."""

    async def insert(self, db: asyncpg.Connection, rows: Sequence[Row]) -> None:
        """Write rows in one committed transaction."""

    def start(self) -> None:
        """Begin to relay."""

    def stop(self) -> None:
        """End; returns when it has ended."""

    def pids(self) -> list[int]:
        """Its processes."""

    def why_stalled(self) -> str:
        """What it says about itself."""


class Droppable(Relay, Protocol):
    """A relay that leaves something behind in the database."""

    async def drop(self, db: asyncpg.Connection) -> None:
        """Leave nothing behind."""


class Measure(Protocol):
    """Runs every part against one relay: drain of a backlog, even rates, idling. Raises `RuntimeError` if it stalls."""

    async def __call__(  # noqa: D102 - told by the class
        self,
        relay: Relay,
        postgres_url: str,
        bootstrap: str,
        *,
        topic: str,
        backlog: int,
        rates: list[int],
        seconds: float,
        broker: int | None = None,
    ) -> dict[str, object]: ...


class MakePeer(Protocol):
    """Makes the peer; ``changes`` are of its settings, by name."""

    def __call__(  # noqa: D102, PLR0917 - the harness' own
        self, folder: Path, postgres_url: str, bootstrap: str, topic: str, port: int, changes: Mapping[str, str]
    ) -> Droppable: ...


class Harness(NamedTuple):
    """What the folder holds."""

    measure: Measure
    peer: MakePeer


def load(folder: Path) -> Harness:
    """The harness in this folder. Raises `FileNotFoundError` if it is not there, and `ImportError`."""
    missing = [f"{name}.py" for name in MODULES if not (folder / f"{name}.py").is_file()]
    if missing:
        raise FileNotFoundError(
            f"the peer's harness is not in {folder} ({', '.join(missing)} missing): name its folder by --peer"
        )
    sys.path.insert(0, str(folder.resolve()))
    try:
        measure, _, peer = (importlib.import_module(name) for name in MODULES)
    finally:
        sys.path.pop(0)
    return Harness(cast("Measure", measure.measure), cast("MakePeer", peer.Debezium))
