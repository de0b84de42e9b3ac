"""Requests to the sockets' port, over a real socket: which are accepted, and what the others are told."""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest

from services.gateway.addresses import networks
from services.gateway.upgrade import Policy
from tests.wires import ACCEPT, REQUEST, TEXT, House, Raw, changed, close, house, request, text

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[House]:
    with house(Policy(origins=("https://app.test", "https://other.test"))) as made:
        yield made


@pytest.fixture
def raw(server: House) -> Iterator[Raw]:
    with server.raw() as made:
        yield made


def refused(raw: Raw, lines: list[str]) -> int:
    """The status; nothing comes after it."""
    reply = raw.ask(lines)
    raw.ended()
    return reply.status


class TestAccepted:
    def test_as_the_standard_says(self, raw: Raw) -> None:
        reply = raw.upgrade()
        assert reply.headers["sec-websocket-accept"] == ACCEPT
        assert reply.headers["upgrade"].lower() == "websocket"
        assert "sec-websocket-extensions" not in reply.headers
        assert "sec-websocket-protocol" not in reply.headers

    @pytest.mark.parametrize("offered", ["waybill.v1", "waybill.v2, waybill.v1", "chat,waybill.v1"])
    def test_our_subprotocol(self, raw: Raw, offered: str) -> None:
        assert raw.upgrade(changed(Sec_WebSocket_Protocol=offered)).headers["sec-websocket-protocol"] == "waybill.v1"

    def test_no_compression_whatever_is_offered(self, raw: Raw) -> None:
        reply = raw.upgrade(changed(Sec_WebSocket_Extensions="permessage-deflate; client_max_window_bits"))
        assert "sec-websocket-extensions" not in reply.headers

    def test_names_and_tokens_in_any_case_and_a_query(self, raw: Raw) -> None:
        lines = [line.replace("websocket", "WebSocket").replace("Upgrade", "upgrade") for line in REQUEST[1:]]
        raw.upgrade(["GET /v1/socket?x=1 HTTP/1.1", *lines])

    @pytest.mark.parametrize("origin", [None, "https://app.test", "https://other.test"])
    def test_allowed_origins(self, raw: Raw, origin: str | None) -> None:
        raw.upgrade(changed(Origin=origin))

    def test_byte_by_byte_with_messages_right_behind(self, raw: Raw) -> None:
        raw.chop(request(REQUEST) + text("early") + text("birds"), 1)
        assert raw.reply().status == 101
        assert [raw.frame() for _ in range(2)] == [(TEXT, b"early"), (TEXT, b"birds")]

    def test_in_one_segment_with_messages_right_behind(self, raw: Raw) -> None:
        raw.send(request(REQUEST) + text("early") + text("birds") + close(1000))
        assert raw.reply().status == 101
        assert [raw.frame() for _ in range(2)] == [(TEXT, b"early"), (TEXT, b"birds")]
        assert raw.closed() == (1000, "")

    def test_garbage_right_behind_is_a_fault_of_the_frames(self, raw: Raw) -> None:
        raw.send(request(REQUEST) + b"GET / HTTP/1.1\r\n\r\n")
        assert raw.reply().status == 101
        assert raw.closed()[0] == 1002

    def test_the_handler_sees_authorization_and_peer(self, server: House, raw: Raw) -> None:
        raw.upgrade([*REQUEST, "Authorization: Bearer a", "Authorization: Bearer b"])
        wire = server.handlers[-1].wire
        assert (wire.authorization, wire.peer) == (["Bearer a", "Bearer b"], "127.0.0.1")
        server.call(wire.forget_headers)
        assert wire.authorization == []

    def test_what_the_kernel_was_told(self, server: House, raw: Raw) -> None:
        raw.upgrade()
        sock = server.handlers[-1].wire._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * server.policy.send_buffer_bytes


class TestRefused:
    @pytest.mark.parametrize("path", ["/", "/v1/socket/", "/v2/socket", "/v1/socket%20", "http://a/v1/socket"])
    def test_another_path(self, raw: Raw, path: str) -> None:
        assert refused(raw, [f"GET {path} HTTP/1.1", *REQUEST[1:]]) == 404

    @pytest.mark.parametrize("method", ["POST", "HEAD", "get"])
    def test_another_method(self, raw: Raw, method: str) -> None:
        assert refused(raw, [f"{method} /v1/socket HTTP/1.1", *REQUEST[1:]]) == 405

    @pytest.mark.parametrize("version", ["8", "12", "14", "thirteen"])
    def test_another_version_of_the_protocol(self, raw: Raw, version: str) -> None:
        reply = raw.ask(changed(Sec_WebSocket_Version=version))
        assert (reply.status, reply.headers["sec-websocket-version"]) == (426, "13")
        raw.ended()

    @pytest.mark.parametrize(
        ("lines", "status"),
        [
            (changed(Sec_WebSocket_Version=None), 400),
            ([*REQUEST, "Sec-WebSocket-Version: 8"], 426),
            (changed(Sec_WebSocket_Key=None), 400),
            (changed(Sec_WebSocket_Key="short"), 400),
            (changed(Sec_WebSocket_Key="AAAA"), 400),
            ([*REQUEST, REQUEST[4]], 400),
            (changed(Upgrade=None), 426),
            (changed(Upgrade="h2c"), 426),
            (changed(Connection="keep-alive"), 426),
            (changed(Connection=None), 426),
            (changed(Host=None), 400),
            ([*REQUEST, "Host: another"], 400),
            (changed(Origin="https://evil.test"), 403),
            (changed(Origin="null"), 403),
            ([*REQUEST, "Origin: https://app.test", "Origin: https://app.test"], 400),
            (changed(Sec_WebSocket_Protocol="waybill.v2"), 400),
            (changed(Sec_WebSocket_Protocol="waybill.v1 waybill.v2"), 400),
            (["GET /v1/socket HTTP/1.0", *REQUEST[1:]], 505),
            (["GET /v1/socket HTTP/2", *REQUEST[1:]], 400),
            (["GET /v1/socket", *REQUEST[1:]], 400),
            (["nonsense", "", ""], 400),
            (changed(Content_Length="5"), 400),
            (changed(Transfer_Encoding="chunked"), 400),
            ([*REQUEST, "no colon"], 400),
            ([*REQUEST, "Bad Name: x"], 400),
            ([*REQUEST, " folded: x"], 400),
            ([*REQUEST, "X: \x00"], 400),
            ([*REQUEST, "X: " + "x" * 8200], 431),
            ([*REQUEST, *["X: y"] * 130], 431),
            ([*REQUEST, *["X: " + "x" * 8000] * 3], 431),
            (["GET /" + "x" * 8200 + " HTTP/1.1", *REQUEST[1:]], 414),
        ],
    )
    def test_what_is_no_handshake(self, raw: Raw, lines: list[str], status: int) -> None:
        assert refused(raw, lines) == status

    def test_an_endless_head_is_refused_as_soon_as_it_is_too_long(self, server: House, raw: Raw) -> None:
        raw.send(b"GET /v1/socket HTTP/1.1\r\nX: " + b"x" * server.policy.head_bytes)
        assert raw.reply().status == 431
        raw.ended()

    def test_what_comes_after_a_refusal_is_not_looked_at(self, server: House, raw: Raw) -> None:
        handlers = len(server.handlers)
        raw.send(request(["GET / HTTP/1.1", *REQUEST[1:]]) + request(REQUEST) + b"\x00" * 100_000)
        assert raw.reply().status == 404
        raw.ended()
        assert len(server.handlers) == handlers


class TestSlow:
    def test_a_head_that_drips_is_cut_off(self) -> None:
        with house(Policy(handshake_s=0.2)) as server, server.raw() as raw, server.raw() as silent:
            begin = time.monotonic()
            for byte in request(REQUEST):
                raw.send(bytes((byte,)))
                if not raw.silent(0.01):
                    break
            assert 0.15 < time.monotonic() - begin < 1.5
            silent.cut_off()
            server.wait(lambda: not server.listener.opening)

    def test_a_slow_but_complete_one_is_not(self) -> None:
        with house(Policy(handshake_s=0.3)) as server, server.raw() as raw:
            raw.chop(request(REQUEST), 1)
            assert raw.reply().status == 101
            assert raw.silent(0.4)
            raw.send(text("still here"))
            assert raw.frame() == (TEXT, b"still here")

    def test_a_client_that_does_not_take_its_refusal_is_cut_off(self) -> None:
        with house(Policy(close_s=0.1)) as server, server.raw() as raw:
            assert raw.ask(["GET / HTTP/1.1", *REQUEST[1:]]).status == 404
            server.wait(lambda: not server.listener.opening)

    def test_the_oldest_of_too_many_that_are_opening_gives_way(self) -> None:
        with house(Policy(most_opening=2)) as server, server.raw() as first:
            server.wait(lambda: len(server.listener.opening) == 1)
            with server.raw() as second:
                server.wait(lambda: len(server.listener.opening) == 2)
                with server.raw() as third:
                    first.cut_off()
                    third.upgrade()
                    second.upgrade()


class TestLimits:
    def test_of_all(self) -> None:
        with house(Policy(most_connections=2, retry_after_s=7)) as server, server.client() as first, server.client():
            with server.raw() as third:
                reply = third.ask(REQUEST)
                assert (reply.status, reply.headers["retry-after"]) == (503, "7")
            reset(first)
            server.wait(lambda: len(server.listener.wires) == 1)
            with server.client():
                pass

    def test_of_an_address(self) -> None:
        with house(Policy(most_per_address=2)) as server, server.client() as first, server.client():
            with server.raw() as third:
                reply = third.ask(REQUEST)
                assert reply.status == 429
                assert int(reply.headers["retry-after"]) > 0
            with server.raw() as third, server.raw() as fourth, server.raw() as fifth:
                # Of as many again it is heard what they want, of more it is not.
                fifth.cut_off()
                assert [third.ask(REQUEST).status, fourth.ask(REQUEST).status] == [429, 429]
            server.wait(lambda: not server.listener.opening)
            reset(first)
            server.wait(lambda: len(server.listener.wires) == 1)
            with server.client():
                pass
        assert server.listener._addresses == {}

    def test_of_an_address_behind_proxies(self) -> None:
        proxies = networks(["127.0.0.0/8", "10.0.0.0/8"])
        with house(Policy(most_per_address=1, trusted_proxies=proxies)) as server, server.raw() as first:
            first.upgrade([*REQUEST, "X-Forwarded-For: 6.6.6.6, 192.0.2.1, 10.0.0.7"])
            assert server.handlers[-1].wire.peer == "192.0.2.1"
            with server.raw() as second:
                assert second.ask([*REQUEST, "X-Forwarded-For: 192.0.2.1"]).status == 429
            with server.raw() as second:
                second.upgrade([*REQUEST, "X-Forwarded-For: 192.0.2.2"])

    def test_who_is_no_proxy_is_not_believed(self, server: House, raw: Raw) -> None:
        raw.upgrade([*REQUEST, "X-Forwarded-For: 192.0.2.1"])
        assert server.handlers[-1].wire.peer == "127.0.0.1"


class TestDraining:
    def test_no_new_ones_and_the_present_ones_stay(self) -> None:
        with house() as server, server.client() as client, server.raw() as early:
            server.wait(lambda: len(server.listener.opening) == 1)
            server.call(server.listener.stop_accepting)
            reply = early.ask(REQUEST)
            assert (reply.status, "retry-after" in reply.headers) == (503, True)
            with pytest.raises(ConnectionError):
                server.raw()
            client.send(text("still here"))
            assert client.frame() == (TEXT, b"still here")

    def test_at_the_end_each_is_told(self) -> None:
        with house() as server:
            client, opening = server.client(), server.raw()
            server.wait(lambda: len(server.listener.opening) == 1)
            server.loop.call_soon_threadsafe(server._stop.set)
            with client, opening:
                assert client.frame().payload[:2] == struct.pack("!H", 1001)
                client.send(close(1001))
                client.ended()
                opening.cut_off()
        assert server.handlers[0].ended == [1001]
        assert not server.listener.opening

    def test_at_the_end_who_does_not_answer_is_cut_off(self) -> None:
        with house(Policy(close_s=0.1)) as server:
            client = server.client()
        assert server.handlers[0].ended == [1001]
        assert not server.listener.wires
        client.sock.close()


def reset(raw: Raw) -> None:
    """End a connection as a phone does that loses its network and comes back."""
    raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.sock.close()
