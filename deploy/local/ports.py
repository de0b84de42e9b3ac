"""Ports on loopback: fixed ones, or free ones that stay the same when a folder is started again."""

import os
import random
import socket
from collections.abc import Collection, Mapping
from typing import Literal

HOST = "127.0.0.1"

NAMES = ("postgres", "kafka", "kafka_controller", "redis")

DEFAULT: Mapping[str, int] = {"postgres": 8432, "kafka": 8492, "kafka_controller": 8493, "redis": 8479}
"""Fixed ports for one machine, beside the services' own 84xx."""

# Below the range from which Linux takes the ports of outgoing connections: while a server is down for a restart,
# nobody's client can slip onto its port.
FREE = range(20_000, 32_000)

FREE_VARIABLE = "WAYBILL_LOCAL_PORTS"
"""Environment: `FIRST-LAST` to take free ports from instead of `FREE`. Who run side by side and choose at the same
moment would find the same port free."""

_chance = random.SystemRandom()
"""Not the module's own: two runs that seed it alike would choose alike."""


def choose(wanted: Literal["auto"] | Mapping[str, int], remembered: Mapping[str, int]) -> dict[str, int]:
    """A port for each of `NAMES`.

    A fixed one is taken as it is (the server's own log tells when it is in use). Under `auto`, and for names that a
    mapping leaves out, it is the remembered one if that is free, else a new free one.
    """
    fixed = {} if wanted == "auto" else dict(wanted)
    if unknown := set(fixed) - set(NAMES):
        raise ValueError(f"unknown port name {min(unknown)!r}; known are {', '.join(NAMES)}")
    chosen: dict[str, int] = {}
    for name in NAMES:
        port = fixed.get(name) or remembered.get(name)
        if port is None or (name not in fixed and not is_free(port)):
            port = free_port(taken={*fixed.values(), *remembered.values(), *chosen.values()})
        chosen[name] = port
    return chosen


def free_port(taken: Collection[int] = ()) -> int:
    """A port of loopback on which nobody listens now, and none of `taken`."""
    among = _free_range()
    for _ in range(1000):
        port = _chance.choice(among)
        if port not in taken and is_free(port):
            return port
    raise OSError(f"no free port from {among[0]} to {among[-1]}")


def _free_range() -> range:
    if not (text := os.environ.get(FREE_VARIABLE)):
        return FREE
    first, _, last = text.partition("-")
    among = range(int(first), int(last) + 1)
    if not among:
        raise ValueError(f"{FREE_VARIABLE} is {text!r}: no port")
    return among


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        # As the servers do: connections in TIME_WAIT must not make their own old port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
