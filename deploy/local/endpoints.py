"""`endpoints.json`: where each part of a running local stack is, and under which process id (protocol §8)."""

from pathlib import Path

import msgspec

from deploy.local.secret_files import replace

FILE = "endpoints.json"


class Endpoints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Addresses stay the same while the stack runs; `pids` change when a part was started again."""

    gateway: str
    """`http://host:port` of the first gateway."""
    ingest: str
    console: str
    private: dict[str, str]
    """Base address of health and metrics, by service."""
    postgres: str
    """An owner's address."""
    kafka: str
    """`host:port`."""
    redis: str
    auth_secret: str
    pids: dict[str, int | list[int]]
    """By service and store; a list where several processes serve one. Of a gateway that has several, the first is the
    one that starts the others again. Who ends a part ends all of its processes."""
    gateways: list[str] = []
    """Every gateway, the first included, if there are several."""
    gateways_private: list[str] = []
    """Their private addresses, in the same order."""

    def pids_of(self, part: str) -> list[int]:
        """The process ids of a part, the first gateway's first. Raises `KeyError` for a part that is not there."""
        found = self.pids[part]
        return found if isinstance(found, list) else [found]

    @property
    def socket(self) -> str:
        """The first gateway's socket, `ws://…`."""
        return socket_of(self.gateway)


def socket_of(gateway: str) -> str:
    """The socket of a gateway at `http://host:port`."""
    return f"ws{gateway.removeprefix('http')}/v1/socket"


def read(file: Path) -> Endpoints:
    """Raises `FileNotFoundError` when nothing runs (or is not ready yet), `ValueError` when it is no such file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Endpoints)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} is not the endpoints of a local stack: {error}") from None


def write(file: Path, endpoints: Endpoints) -> None:
    """Replace the file as a whole. Only its owner may read it: it holds a secret."""
    replace(file, msgspec.json.format(msgspec.json.encode(endpoints), indent=2) + b"\n")
