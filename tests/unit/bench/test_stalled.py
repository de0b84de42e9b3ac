import contextlib
import json
import socket
import struct
import threading
from typing import Any

import pytest

from bench import flood, stalled


def unmasked(frame: bytes) -> Any:
    size, at = frame[1] & 0x7F, 2
    if size == 126:
        (size,) = struct.unpack("!H", frame[2:4])
        at = 4
    mask, payload = frame[at : at + 4], frame[at + 4 :]
    assert len(payload) == size
    return json.loads(bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload)))


@pytest.mark.parametrize("length", [0, 110, 130, 60_000])
def test_a_frame_is_masked_text_of_its_length(length: int) -> None:
    message = {"t": "hello", "token": "x" * length}
    frame = stalled.text_frame(message, b"\x01\x02\x03\x04")
    assert frame[0] == 0x81
    assert frame[1] & 0x80
    assert unmasked(frame) == message


def test_a_frame_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        stalled.text_frame({"token": "x" * 70_000}, b"1234")


def test_the_upgrade_asks_for_the_protocol() -> None:
    lines = stalled.upgrade("127.0.0.1:8400", "/v1/socket", bytes(16)).decode().split("\r\n")
    assert lines[0] == "GET /v1/socket HTTP/1.1"
    assert "Host: 127.0.0.1:8400" in lines
    assert "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==" in lines
    assert lines[-2:] == ["", ""]


class Server:
    """Answers the upgrade, keeps the hello, and then says ``answer``, or hangs up if there is none."""

    def __init__(self, answer: bytes | None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self.listener.getsockname()[1]}/v1/socket"
        self.hello = b""
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self.listener, self.listener.accept()[0] as connection:
            connection.settimeout(10)
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
            self.hello = connection.recv(4096)
            if self._answer is None:
                return
            connection.sendall(self._answer)
            with contextlib.suppress(ConnectionResetError):  # what the client has not taken
                connection.recv(4096)

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


def test_a_client_says_hello_sees_that_it_is_listed_and_takes_nothing() -> None:
    server = Server(b'\x81\x0e{"t":"listed"}')
    with stalled.stalled(server.url, {"ada": "a token"}) as (client,):
        assert client.recv(4096, socket.MSG_PEEK).startswith(b"HTTP/1.1 101")
    server.join()
    assert unmasked(server.hello)["token"] == "a token"


def test_a_client_that_is_sent_away_is_no_stalled_one() -> None:
    server = Server(None)
    with pytest.raises(OSError, match="not listed"), stalled.stalled(server.url, {"ada": "a token"}):
        pass
    server.join()


def test_what_the_kernel_holds_is_that_of_the_gateways_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        port = client.getsockname()[1]
        other = port ^ 1
        table = "\n".join(
            [
                "  sl  local_address rem_address   st tx_queue rx_queue",
                f"   0: 0100007F:20D0 0100007F:{port:04X} 01 00000100:00000000 00:00000000",
                f"   1: 0100007F:20D0 0100007F:{other:04X} 01 00001000:00000000 00:00000000",
                f"   2: 0100007F:{port:04X} 0100007F:20D0 01 00000000:00000300 00:00000000",
            ]
        )
        assert stalled.unsent_bytes([client], table) == 0x100
        assert stalled.unsent_bytes([client]) == 0


def of(*, grown_kib: float, open_after: int = 50, published: int = 10_000, gaps: int = 0) -> flood.Flood:
    answer = {"published": published, "frame_bytes": 2_300, "expected_deliveries": 5, "deliveries": 5, "gaps": gaps}
    return flood.Flood(answer, grown_kib, open_after, 3_000.0)


def test_what_a_stalled_client_adds_is_the_difference_of_two_floods() -> None:
    figures, details, errors = flood.compared(of(grown_kib=8_000), of(grown_kib=10_000), 50)
    assert figures == {"stalled_kib": 40.0, "stalled_kernel_kib": 60.0}
    assert details["stalled_mib_each"] == 21.9
    assert errors == {}


def test_a_flood_that_says_nothing_is_an_error() -> None:
    small = of(grown_kib=10_000, published=5_000, open_after=48, gaps=2)
    _, _, errors = flood.compared(of(grown_kib=8_000, gaps=1), small, 50)
    assert errors == {"gaps": 3, "mib_too_few": 10, "sent_away": 2}
