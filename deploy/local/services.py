"""Which service processes a local stack has, on which ports, with which environment. Pure but for choosing ports."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from deploy.local.ports import HOST, free_port, is_free
from deploy.migrate import url_of_role

STOP_ORDER = ("gateway", "ingest", "receipts", "relay", "console")
"""Doors first, then those who carry on what came in through them."""

Ports = Mapping[str, int]
"""By name of the process; its private port under `NAME_private`."""

_PUBLIC = {"gateway": 8400, "ingest": 8401, "console": 8402}
_PRIVATE = {"gateway": 9400, "ingest": 9401, "console": 9402, "relay": 9403, "receipts": 9404}
_FURTHER_GATEWAYS = 10
"""Gateway n has the ports of the first one plus this plus n."""


class PortTakenError(RuntimeError):
    """Somebody else listens on a fixed port."""


class Stores(Protocol):
    """The stores' addresses."""

    @property
    def postgres_url(self) -> str:
        """The owner's."""

    @property
    def kafka(self) -> str:
        """`host:port`."""

    @property
    def redis(self) -> str:
        """`redis://…`."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service process as it is to be run."""

    name: str
    """`ingest`, or for further gateways `gateway-2` …"""
    argv: Sequence[str]
    private: str
    """`http://host:port` of its health and metrics."""
    environment: Mapping[str, str]

    @property
    def kind(self) -> str:
        """The service that it is a process of."""
        return kind_of(self.name)


def kind_of(name: str) -> str:
    """The service that a process of this name belongs to."""
    return name.partition("-")[0]


def names(gateways: int) -> list[str]:
    """The processes of a stack with that many gateways, in the order in which they are stopped."""
    further = [f"gateway-{number}" for number in range(2, gateways + 1)]
    return [name for kind in STOP_ORDER for name in (kind, *(further if kind == "gateway" else ()))]


def choose_ports(wanted: Literal["fixed", "auto"], file: Path, gateways: int) -> dict[str, int]:
    """The ports of every process, kept in `file`.

    `auto` takes those that the file remembers where they are free, so that a folder's addresses stay the same, else
    free ones. Raises `PortTakenError` when a fixed one is not free.
    """
    remembered: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
    chosen: dict[str, int] = {}
    for name, default in _defaults(gateways).items():
        if wanted == "fixed":
            if not is_free(default):
                raise PortTakenError(f"port {default} of {name} is in use; stop who holds it, or take --ports auto")
            chosen[name] = default
        else:
            port = remembered.get(name)
            taken = {*remembered.values(), *chosen.values()}
            chosen[name] = port if port is not None and is_free(port) else free_port(taken)
    file.write_text(json.dumps(chosen))
    return chosen


def plan(
    stores: Stores, ports: Ports, *, gateways: int, secret: str, digest_key: str, base: Mapping[str, str]
) -> list[Service]:
    """Every service process, in the order in which they are stopped.

    `base` is the environment that they inherit; what the stack itself decides stands above it.
    """
    secrets = {"secret": secret, "digest": digest_key}
    return [
        _service(name, stores=stores, ports=ports, gateways=gateways, secrets=secrets, base=base)
        for name in names(gateways)
    ]


def public(ports: Ports, name: str) -> str:
    """A process's public address."""
    return f"http://{HOST}:{ports[name]}"


def private(ports: Ports, name: str) -> str:
    """A process's private address."""
    return f"http://{HOST}:{ports[f'{name}_private']}"


def _service(
    name: str, *, stores: Stores, ports: Ports, gateways: int, secrets: Mapping[str, str], base: Mapping[str, str]
) -> Service:
    kind = kind_of(name)
    variables = {
        "POSTGRES_URL": url_of_role(stores.postgres_url, kind),
        "KAFKA_BOOTSTRAP": stores.kafka,
        "REDIS_URL": stores.redis,
        "AUTH_SECRET": secrets["secret"],
        f"{kind.upper()}_PRIVATE_PORT": str(ports[f"{name}_private"]),
    }
    if name in ports:
        variables[f"{kind.upper()}_PORT"] = str(ports[name])
    match kind:
        case "gateway":
            number = name.partition("-")[2] or "1"
            variables |= {"INGEST_URL": public(ports, "ingest"), "GATEWAY_NAME": f"gateway-{number}"}
        case "ingest":
            variables["DIGEST_KEY"] = secrets["digest"]
        case "relay":
            # A name that outlives the process: its next life takes the leases back without waiting for their end.
            variables["RELAY_OWNER"] = "relay-1"
        case "receipts":
            # Likewise: its next life takes its partitions back without waiting for the dead member's session to end.
            variables["RECEIPTS_INSTANCE"] = "receipts-1"
        case "console":
            of = {other: private(ports, other) for other in names(gateways)}
            variables["CONSOLE_SERVICES"] = ",".join(f"{other}={url}" for other, url in of.items())
    environment = {**base, **{f"WAYBILL_{key}": value for key, value in variables.items()}}
    argv = (sys.executable, "-P", "-m", f"services.{kind}.main")
    return Service(name, argv, private(ports, name), environment)


def _defaults(gateways: int) -> dict[str, int]:
    ports = dict(_PUBLIC) | {f"{kind}_private": port for kind, port in _PRIVATE.items()}
    for number in range(2, gateways + 1):
        ports[f"gateway-{number}"] = _PUBLIC["gateway"] + _FURTHER_GATEWAYS + number
        ports[f"gateway-{number}_private"] = _PRIVATE["gateway"] + _FURTHER_GATEWAYS + number
    return ports
