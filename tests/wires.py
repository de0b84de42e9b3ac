"""A listening socket of the gateway with an echo behind it, and a client that builds its frames byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import zlib
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import uvloop

from services.gateway.listener import Listener, serving
from services.gateway.upgrade import Policy
from services.gateway.wire import Wire, ready
from tests.waiting import until

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

TIMEOUT_S = 10.0
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
REQUEST = (
    "GET /v1/socket HTTP/1.1",
    "Host: waybill.test",
    "Upgrade: websocket",
    "Connection: keep-alive, Upgrade",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="


class Echo:
    """Answers each message with itself; keeps what it was told."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.messages: list[str | bytes] = []
        self.ended: list[int] = []
        self.writables = 0
        self.on_message: Callable[[str | bytes], None] = self.echo

    def echo(self, data: str | bytes) -> None:
        payload = data.encode() if isinstance(data, str) else data
        frame = ready(payload)
        self.wire.write(frame if isinstance(data, str) else bytes((frame[0] + 1,)) + frame[1:])

    def message(self, data: str | bytes) -> None:
        self.messages.append(data)
        self.on_message(data)

    def writable(self) -> None:
        self.writables += 1

    def gone(self, code: int) -> None:
        self.ended.append(code)


class House:
    """A server on a thread of its own, with uvloop as in the service; a test talks to it with plain sockets."""

    def __init__(self, policy: Policy, ssl: ssl.SSLContext | None = None) -> None:
        self.policy = policy
        self.handlers: list[Echo] = []
        self.listener: Listener
        self.loop: asyncio.AbstractEventLoop
        self._ssl = ssl
        self._stop: asyncio.Event
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), name="house")

    def factory(self, wire: Wire) -> Echo:
        made = Echo(wire)
        self.handlers.append(made)
        return made

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serving("127.0.0.1", 0, self.factory, policy=self.policy, ssl=self._ssl) as made:
            self.listener = made
            self._up.set()
            await self._stop.wait()

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(TIMEOUT_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def call(self, what: Callable[[], T]) -> T:
        """Run something in the server's loop."""

        async def run() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(TIMEOUT_S)

    def wait(self, condition: Callable[[], T]) -> T:
        """Wait until it is true in the server's loop; returns its value."""

        waiting = until(condition, timeout=TIMEOUT_S, what="the server's state")
        return asyncio.run_coroutine_threadsafe(waiting, self.loop).result(2 * TIMEOUT_S)

    def raw(self) -> Raw:
        """A connection that has said nothing yet."""
        return Raw(socket.create_connection(("127.0.0.1", self.listener.port), TIMEOUT_S))

    def client(self) -> Raw:
        """A connection after the handshake. Its handler is the last of `handlers`."""
        made = self.raw()
        made.upgrade()
        return made


@contextlib.contextmanager
def house(policy: Policy | None = None, ssl: ssl.SSLContext | None = None) -> Iterator[House]:
    made = House(policy or Policy(), ssl)
    made.start()
    try:
        yield made
    finally:
        made.stop()


class Frame(NamedTuple):
    opcode: int
    payload: bytes


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Raw:
    """A plain socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._read = b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def chop(self, data: bytes, size: int) -> None:
        """Send it in pieces, each of which arrives by itself."""
        for at in range(0, len(data), size):
            self.send(data[at : at + size])

    def ask(self, lines: Sequence[str]) -> Reply:
        self.send(request(lines))
        return self.reply()

    def upgrade(self, lines: Sequence[str] = REQUEST) -> Reply:
        reply = self.ask(lines)
        assert reply.status == 101, reply
        return reply

    def reply(self) -> Reply:
        """The HTTP response; of one that ends the connection also the body."""
        while b"\r\n\r\n" not in self._read:
            self._more()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        body = self._take(int(headers.get("content-length", "0")))
        return Reply(int(first.split()[1]), headers, body)

    def frame(self) -> Frame:
        """The next frame, which has no mask and is whole. Raises `EOFError`, `ConnectionError`."""
        first, length = self._take(2)
        assert first & 0xF0 == 0x80, "every frame of the server is whole"
        if length == 126:
            (length,) = struct.unpack("!H", self._take(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", self._take(8))
        return Frame(first & 0x0F, self._take(length))

    def closed(self) -> tuple[int | None, str]:
        """What the server's close frame says, which is the next one, and after which nothing comes."""
        opcode, payload = self.frame()
        assert opcode == CLOSE, (opcode, payload[:80])
        self.ended()
        return (struct.unpack("!H", payload[:2])[0], payload[2:].decode()) if payload else (None, "")

    def ended(self) -> None:
        """Nothing comes any more, and the server's side is shut."""
        assert self._read == b""
        assert self.sock.recv(1) == b""

    def cut_off(self) -> None:
        """The server ends the connection without a word."""
        with contextlib.suppress(ConnectionError):
            self.ended()

    def silent(self, seconds: float) -> bool:
        """Whether nothing comes, not even an end, for so long."""
        self.sock.settimeout(seconds)
        try:
            self._more()
        except TimeoutError:
            return True
        except (EOFError, ConnectionError):
            return False
        finally:
            self.sock.settimeout(TIMEOUT_S)
        return False

    def _take(self, count: int) -> bytes:
        while len(self._read) < count:
            self._more()
        taken, self._read = self._read[:count], self._read[count:]
        return taken

    def _more(self) -> None:
        data = self.sock.recv(1 << 18)
        if not data:
            raise EOFError
        self._read += data


def request(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1")


def changed(**changes: str | None) -> list[str]:
    """The request with headers changed, added, or left out (None); `_` in a name stands for `-`."""
    lines = list(REQUEST)
    for name, value in changes.items():
        header = name.replace("_", "-")
        lines = [line for line in lines if not line.lower().startswith(f"{header.lower()}:")]
        if value is not None:
            lines.append(f"{header}: {value}")
    return lines


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True) -> bytes:
    """A client's frame."""
    length = len(payload)
    first = bytes(((0x80 if fin else 0) | rsv << 4 | opcode,))
    mask_bit = 0x80 if masked else 0
    if length < 126:
        head = first + bytes((mask_bit | length,))
    elif length < 65536:
        head = first + bytes((mask_bit | 126,)) + struct.pack("!H", length)
    else:
        head = first + bytes((mask_bit | 127,)) + struct.pack("!Q", length)
    if not masked:
        return head + payload
    mask = struct.pack("!I", zlib.crc32(head + payload))
    repeated = (mask * (length // 4 + 1))[:length]
    return head + mask + (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")


def text(said: str) -> bytes:
    return frame(TEXT, said.encode())


def close(code: int | None, reason: bytes = b"") -> bytes:
    return frame(CLOSE, b"" if code is None else struct.pack("!H", code) + reason)
