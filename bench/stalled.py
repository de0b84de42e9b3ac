"""Clients that say `hello`, see that they are listed, and never read again: what does the gateway keep for them?

They look at what has come without taking it (`MSG_PEEK`), so that from the first byte on nothing leaves their sockets.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_RECEIVE_BYTES = 4096
"""What the client's kernel takes for it; the kernel makes more of it for its own use."""

_TIMEOUT_S = 20.0
_PEEK_BYTES = 16 * 1024
_PEEK_POLL_S = 0.01
_TEXT, _MASKED = 0x81, 0x80


def upgrade(host: str, path: str, key: bytes) -> bytes:
    """The request that opens a WebSocket."""
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {host}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {base64.b64encode(key).decode()}",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Protocol: waybill.v1",
    ]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def text_frame(message: Mapping[str, object], mask: bytes) -> bytes:
    """A masked text frame of at most 64 KiB. Raises `ValueError` for a longer one."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    if len(payload) > 0xFFFF:
        raise ValueError("too long")
    short = len(payload) < 126
    head = struct.pack("!BB", _TEXT, _MASKED | (len(payload) if short else 126))
    size = b"" if short else struct.pack("!H", len(payload))
    return head + size + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


@contextlib.contextmanager
def stalled(url: str, tokens: Mapping[str, str]) -> Iterator[list[socket.socket]]:
    """One client per user of ``tokens``, each of them listed, while the block runs. Blocks; raises `OSError`."""
    with contextlib.ExitStack() as closing:
        yield [closing.enter_context(_client(url, user, token)) for user, token in tokens.items()]


def unsent_bytes(clients: Sequence[socket.socket], table: str | None = None) -> int:
    """What the kernel holds at the gateway's end of these clients' connections: written, and not taken.

    ``table``: the text of `/proc/net/tcp`.
    """
    text = Path("/proc/net/tcp").read_text(encoding="ascii") if table is None else table
    ports = {client.getsockname()[1] for client in clients}
    found = 0
    for line in text.splitlines()[1:]:
        _, _, remote, _, queues, *_ = line.split()
        if int(remote.rpartition(":")[2], 16) in ports:
            found += int(queues.partition(":")[0], 16)
    return found


@contextlib.contextmanager
def _client(url: str, user: str, token: str) -> Iterator[socket.socket]:
    where = urlsplit(url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        client.settimeout(_TIMEOUT_S)
        client.connect((where.hostname, where.port))
        client.sendall(upgrade(where.netloc, where.path, os.urandom(16)))
        hello = {"t": "hello", "token": token, "device_id": f"d-{user}", "client": "stalled/1", "sync": "live"}
        _wait_for(client, b"\r\n\r\n")
        client.sendall(text_frame(hello, os.urandom(4)))
        _wait_for(client, b'"t":"listed"')
        yield client


def _wait_for(client: socket.socket, what: bytes) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    # What has come hides the end of the connection from who only looks.
    ended = select.poll()
    ended.register(client, select.POLLRDHUP)
    while what not in (seen := client.recv(_PEEK_BYTES, socket.MSG_PEEK)):
        if ended.poll(0) or time.monotonic() > deadline:
            raise OSError(f"a client that is to stall was not listed; it saw {seen[-200:]!r}")
        time.sleep(_PEEK_POLL_S)
