"""Who a client is by its address, and under what it is counted. Pure."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_IPV6_SUBSCRIBER = 64


def client_of(peer: str, forwarded: Sequence[str], trusted: Sequence[Network]) -> str:
    """The client's address: the peer's, or what the nearest proxies that are trusted say of it.

    ``forwarded`` are the values of `X-Forwarded-For`. Each proxy adds whom it was called by at its end, so from there
    on it is believed as long as the one who said it is trusted. What is no address ends that.
    """
    address = peer
    hops = [hop.strip() for value in forwarded for hop in value.split(",")] if trusted else []
    while hops and is_trusted(address, trusted):
        hop = _parsed(hops.pop())
        if hop is None:
            break
        address = str(hop)
    return address


def is_trusted(address: str, trusted: Sequence[Network]) -> bool:
    """Whether it is in one of these networks."""
    parsed = _parsed(address) if trusted else None
    return parsed is not None and any(parsed in network for network in trusted)


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Networks from their CIDR notation. Raises `ValueError`."""
    return tuple(map(ipaddress.ip_network, texts))


def subscriber(address: str) -> str:
    """Under what an address is counted: itself, or the /64 that an IPv6 subscriber has as a whole."""
    parsed = _parsed(address) if ":" in address else None
    if parsed is None:
        return address
    if parsed.version == 4:
        return str(parsed)
    return str(ipaddress.ip_network((parsed, _IPV6_SUBSCRIBER), strict=False))


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return (parsed.ipv4_mapped or parsed) if isinstance(parsed, ipaddress.IPv6Address) else parsed
