"""What a wire does for its handler, over a real socket: writes, pauses, pings, faults, and the end."""

from __future__ import annotations

import socket
import ssl
import struct
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from services.gateway.listener import tls_context
from services.gateway.upgrade import Policy
from services.gateway.wire import ready
from tests.certificates import self_signed
from tests.wires import (
    BINARY,
    CONTINUATION,
    PING,
    PONG,
    REQUEST,
    TEXT,
    Echo,
    House,
    Raw,
    close,
    frame,
    house,
    request,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.gateway.wire import Wire

CLOSE_S = 0.1
BUFFER = 32 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[House]:
    with house(Policy(close_s=CLOSE_S, buffer_bytes=BUFFER, send_buffer_bytes=16 * 1024)) as made:
        yield made


@pytest.fixture
def client(server: House) -> Iterator[Raw]:
    with server.client() as made:
        yield made


@pytest.fixture
def handler(server: House, client: Raw) -> Echo:
    return server.handlers[-1]


def told(handler: Echo, code: int) -> None:
    assert handler.ended == [code]


class TestWriting:
    @pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
    def test_a_ready_frame_is_what_a_client_reads(self, server: House, client: Raw, handler: Echo, size: int) -> None:
        server.call(lambda: handler.wire.write(ready(b"*" * size)))
        assert client.frame() == (TEXT, b"*" * size)

    def test_several_writes_of_one_turn_leave_together(self, server: House, client: Raw, handler: Echo) -> None:
        before = segments(client.sock)
        server.call(lambda: [handler.wire.write(ready(b"%d" % number)) for number in range(10)])
        assert [client.frame().payload for _ in range(10)] == [b"%d" % number for number in range(10)]
        assert segments(client.sock) == before + 1

    def test_a_client_that_does_not_read_congests_its_own_wire(self, server: House, client: Raw, handler: Echo) -> None:
        one = ready(b"*" * 1000)

        def fill() -> int:
            written = 0
            while not handler.wire.congested and written < 10_000:
                handler.wire.write(one)
                written += 1
            return written

        with server.client() as other:
            written = server.call(fill)
            assert handler.wire.congested
            assert BUFFER < handler.wire.waiting_bytes <= BUFFER + 2 * len(one)
            assert handler.writables == 0
            # It gets no pongs either, and the others are as before.
            client.send(frame(PING, b"x") * 10)
            other.send(text("hello"))
            assert other.frame() == (TEXT, b"hello")
            assert [client.frame().opcode for _ in range(written)] == [TEXT] * written
            server.wait(lambda: handler.writables == 1 and not handler.wire.congested)
            client.send(text("and now"))
            assert client.frame() == (TEXT, b"and now")

    def test_bytes_are_counted(self, server: House, client: Raw, handler: Echo) -> None:
        was, had = server.listener.bytes_written, server.listener.bytes_read
        client.send(text("hello"))
        client.frame()
        assert server.listener.bytes_written - was == len(ready(b"hello"))
        assert server.listener.bytes_read - had == len(text("hello"))


class TestPausing:
    def test_what_has_arrived_waits_in_its_order(self, server: House, client: Raw, handler: Echo) -> None:
        handler.on_message = lambda _: handler.wire.pause()
        client.send(text("1") + text("2"))
        server.wait(lambda: handler.messages)
        client.send(text("3") + frame(TEXT, b"4", fin=False))
        client.send(frame(CONTINUATION, b"4") + text("5"))
        for count in range(1, 5):
            # Several turns of the loop change nothing; each resume gives one more.
            for _ in range(3):
                assert server.call(lambda: len(handler.messages)) == count
            server.call(handler.wire.resume)
            server.wait(lambda count=count: len(handler.messages) == count + 1)
        assert handler.messages == ["1", "2", "3", "44", "5"]

    def test_resume_gives_nothing_before_it_returns(self, server: House, client: Raw, handler: Echo) -> None:
        def first(data: str | bytes) -> None:
            handler.wire.pause()
            handler.wire.resume()
            handler.echo(data)

        handler.on_message = first
        client.send(b"".join(text(str(number)) for number in range(200)))
        assert [client.frame().payload for _ in range(200)] == [b"%d" % number for number in range(200)]

        def pausing(_: str | bytes) -> None:
            handler.wire.pause()

        handler.on_message = pausing
        client.send(text("a") + text("b"))
        server.wait(lambda: handler.messages[-1] == "a")

        def resumed() -> str | bytes:
            handler.wire.resume()
            return handler.messages[-1]

        assert server.call(resumed) == "a"
        server.wait(lambda: handler.messages[-1] == "b")

    def test_what_the_transport_still_brings_waits(self, server: House, client: Raw, handler: Echo) -> None:
        server.call(lambda: (handler.wire.pause(), handler.wire.data_received(text("1") + text("2"))))
        assert server.call(lambda: handler.messages) == []
        server.call(lambda: (handler.wire.resume(), handler.wire.pause()))
        for _ in range(3):
            assert server.call(lambda: handler.messages) == []
        server.call(handler.wire.resume)
        assert [client.frame().payload for _ in range(2)] == [b"1", b"2"]

    def test_it_may_be_paused_from_the_start(self, server: House, monkeypatch: pytest.MonkeyPatch) -> None:
        def paused(wire: Wire) -> Echo:
            wire.pause()
            return server.factory(wire)

        monkeypatch.setattr(server.listener, "factory", paused)
        with server.raw() as client:
            client.send(request(REQUEST) + text("early"))
            client.reply()
            handler = server.handlers[-1]
            assert server.call(lambda: handler.messages) == []
            server.call(handler.wire.resume)
            assert client.frame() == (TEXT, b"early")

    def test_a_client_that_goes_on_sending_stalls(self, server: House, client: Raw, handler: Echo) -> None:
        server.call(handler.wire.pause)
        client.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.send(frame(BINARY, b"*" * 60_000) * 1000)
        assert server.call(lambda: handler.messages) == []

    def test_a_close_ends_the_pause(self, server: House, client: Raw, handler: Echo) -> None:
        server.call(handler.wire.pause)
        client.send(text("never told") + close(4000))
        server.call(lambda: handler.wire.close(4408, "too slow"))
        assert client.closed() == (4408, "too slow")
        server.wait(lambda: handler.ended)
        told(handler, 4408)
        assert handler.messages == []


class TestFairness:
    def test_one_clients_burst_lets_others_in(self, server: House, client: Raw, handler: Echo) -> None:
        order: list[str] = []
        with server.client() as other:
            second = server.handlers[-1]
            second.on_message = lambda _: order.append("other")

            def burst(_: str | bytes) -> None:
                if not order:
                    other.send(text("me too"))
                order.append("burst")

            handler.on_message = burst
            client.send(b"".join(text("*") for _ in range(5000)))
            server.wait(lambda: len(order) == 5001)
        assert order.index("other") < 1000

    @pytest.mark.parametrize("opcode", [PING, PONG, CONTINUATION])
    def test_frames_that_say_nothing_have_a_limit(self, client: Raw, opcode: int) -> None:
        client.send(frame(TEXT, fin=False) + frame(opcode, fin=opcode != CONTINUATION) * 600)
        assert [client.frame().opcode for _ in range(499 if opcode == PING else 0)] == [PONG] * 499 * (opcode == PING)
        assert client.closed()[0] == 4429

    def test_parts_that_say_something_have_none(self, client: Raw) -> None:
        client.send(frame(TEXT, b"*", fin=False) + frame(CONTINUATION, b"*", fin=False) * 2000 + frame(CONTINUATION))
        assert client.frame() == (TEXT, b"*" * 2001)


class TestPings:
    def test_a_pong_answers_its_ping_and_those_before(self, server: House, client: Raw, handler: Echo) -> None:
        wire = handler.wire
        server.call(lambda: [wire.ping() for _ in range(3)])
        pings = [client.frame() for _ in range(3)]
        assert {opcode for opcode, _ in pings} == {PING}
        assert wire.unanswered == 3
        for number, left in ((1, 1), (0, 1), (2, 0), (2, 0)):
            client.send(frame(PONG, pings[number].payload) + text("seen"))
            assert client.frame() == (TEXT, b"seen")
            assert wire.unanswered == left

    @pytest.mark.parametrize("payload", [b"", b"abc", struct.pack("!I", 0), struct.pack("!I", 2), b"\xff" * 4])
    def test_other_pongs_answer_nothing(self, server: House, client: Raw, handler: Echo, payload: bytes) -> None:
        server.call(handler.wire.ping)
        assert client.frame().opcode == PING
        client.send(frame(PONG, payload) + text("seen"))
        assert client.frame() == (TEXT, b"seen")
        assert handler.wire.unanswered == 1

    def test_none_while_its_pong_would_not_be_seen(self, server: House, client: Raw, handler: Echo) -> None:
        server.call(lambda: (handler.wire.pause(), handler.wire.ping(), handler.wire.resume(), handler.wire.ping()))
        assert client.frame().opcode == PING
        assert handler.wire.unanswered == 1


class TestClosing:
    def test_the_reason_is_cut_at_a_whole_character(self, server: House, client: Raw, handler: Echo) -> None:
        server.call(lambda: handler.wire.close(4403, "ü" * 50 + "€" * 50))
        assert client.closed() == (4403, "ü" * 50 + "€" * 6)

    def test_what_was_written_before_comes_first_and_nothing_after(
        self, server: House, client: Raw, handler: Echo
    ) -> None:
        def end(wire: Wire) -> None:
            wire.write(ready(b"last words"))
            wire.close(4503, "the server drains")
            wire.write(ready(b"never"))
            wire.ping()
            wire.close(4500, "never")
            wire.pause()

        client.send(text("before"))
        assert client.frame() == (TEXT, b"before")
        server.call(lambda: end(handler.wire))
        assert not handler.wire.open
        assert client.frame() == (TEXT, b"last words")
        client.send(text("too late") + frame(PING) + close(4503))
        assert client.closed() == (4503, "the server drains")
        server.wait(lambda: handler.ended)
        told(handler, 4503)
        assert handler.messages == ["before"]

    def test_a_client_that_does_not_answer_is_cut_off(self, server: House, client: Raw, handler: Echo) -> None:
        server.call(lambda: handler.wire.close(4401, "expired"))
        assert client.closed() == (4401, "expired")
        server.wait(lambda: handler.ended)
        told(handler, 4401)

    def test_a_client_that_reads_nothing_is_cut_off(self, server: House, client: Raw, handler: Echo) -> None:
        server.call(lambda: handler.wire.write(ready(b"*" * 10_000_000)))
        server.call(lambda: handler.wire.close(4408, "too slow"))
        server.wait(lambda: handler.ended)
        told(handler, 4408)

    def test_a_client_that_closes_and_reads_nothing_is_cut_off(self, server: House, client: Raw, handler: Echo) -> None:
        server.call(lambda: handler.wire.write(ready(b"*" * 10_000_000)))
        client.send(close(1000))
        server.wait(lambda: handler.ended and handler.wire not in server.listener.wires)
        told(handler, 1000)

    def test_a_client_that_shuts_its_side_and_reads_nothing_is_cut_off(
        self, server: House, client: Raw, handler: Echo
    ) -> None:
        server.call(lambda: handler.wire.write(ready(b"*" * 10_000_000)))
        client.sock.shutdown(socket.SHUT_WR)
        server.wait(lambda: handler.ended and handler.wire not in server.listener.wires)
        told(handler, 1006)

    def test_a_client_that_shuts_its_side_still_gets_what_was_written(
        self, server: House, client: Raw, handler: Echo
    ) -> None:
        wire = handler.wire
        # As the loop does it when the end comes in the very turn of the write.
        server.call(lambda: (wire.write(ready(b"an answer")), wire.eof_received(), wire._transport.close()))
        assert client.frame() == (TEXT, b"an answer")
        client.ended()

    def test_an_abort_says_nothing(self, server: House, client: Raw, handler: Echo) -> None:
        server.call(handler.wire.abort)
        client.cut_off()
        server.wait(lambda: handler.ended)
        told(handler, 1006)
        server.call(
            lambda: (handler.wire.write(b"x"), handler.wire.ping(), handler.wire.close(4500), handler.wire.abort())
        )
        told(handler, 1006)


class TestFaults:
    @pytest.fixture(autouse=True)
    def logged(self) -> Iterator[None]:
        with capture_logs() as entries:
            yield
        assert {entry["log_level"] for entry in entries} == {"error"}

    def test_in_a_message(self, server: House, client: Raw, handler: Echo) -> None:
        def broken(_: str | bytes) -> None:
            raise ValueError("a bug")

        handler.on_message = broken
        with server.client() as other:
            client.send(text("1") + text("2"))
            assert client.closed() == (4500, "a fault of the server")
            other.send(text("as before"))
            assert other.frame() == (TEXT, b"as before")
        assert handler.messages == ["1"]
        told(handler, 4500)

    def test_after_an_abort(self, server: House, client: Raw, handler: Echo) -> None:
        def broken(_: str | bytes) -> None:
            handler.wire.abort()
            raise ValueError("a bug")

        handler.on_message = broken
        client.send(text("1"))
        client.cut_off()
        server.wait(lambda: handler.ended)
        told(handler, 1006)

    def test_in_the_making(self, server: House, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(_: Wire) -> Echo:
            raise ValueError("a bug")

        with server.client() as before:
            monkeypatch.setattr(server.listener, "factory", broken)
            with server.client() as client:
                assert client.closed() == (4500, "a fault of the server")
            before.send(text("as before"))
            assert before.frame() == (TEXT, b"as before")

    def test_in_writable_and_at_the_end(self, server: House, client: Raw, handler: Echo) -> None:
        class Broken(Echo):
            def writable(self) -> None:
                super().writable()
                raise ValueError("a bug")

            def gone(self, code: int) -> None:
                super().gone(code)
                raise ValueError("a bug")

        broken = Broken(handler.wire)
        handler.wire._handler = broken
        payload = b"*" * 1_000_000
        server.call(lambda: handler.wire.write(ready(payload)))
        assert client.frame() == (TEXT, payload)
        assert client.closed() == (4500, "a fault of the server")
        assert (broken.writables, broken.ended) == (1, [4500])


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, ssl.SSLContext]]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = self_signed(folder)
    context = tls_context(certificate, key)
    with house(Policy(close_s=CLOSE_S, handshake_s=0.3), context) as made:
        yield made, ssl.create_default_context(cafile=certificate)


class TestTls:
    def connected(self, secure: tuple[House, ssl.SSLContext]) -> Raw:
        server, context = secure
        plain = socket.create_connection(("127.0.0.1", server.listener.port), 10)
        return Raw(context.wrap_socket(plain, server_hostname="localhost"))

    def test_messages_and_the_end(self, secure: tuple[House, ssl.SSLContext]) -> None:
        with self.connected(secure) as client:
            assert client.sock.version() in {"TLSv1.2", "TLSv1.3"}
            client.upgrade()
            for size in (1, 1000, 300_000):
                client.send(frame(BINARY, b"*" * size))
                assert client.frame() == (BINARY, b"*" * size)
            client.send(close(1000))
            assert client.closed() == (1000, "")
        secure[0].wait(lambda: not secure[0].listener.wires)

    def test_a_pause(self, secure: tuple[House, ssl.SSLContext]) -> None:
        with self.connected(secure) as client:
            client.upgrade()
            handler = secure[0].handlers[-1]
            handler.on_message = lambda _: handler.wire.pause()
            client.send(text("1") + text("2"))
            client.send(text("3"))
            secure[0].wait(lambda: handler.messages)
            for count in (1, 2, 3):
                assert secure[0].call(lambda: len(handler.messages)) == count
                secure[0].call(handler.wire.resume)
                if count < 3:
                    secure[0].wait(lambda count=count: len(handler.messages) == count + 1)

    def test_a_refusal_is_read_to_its_end(self, secure: tuple[House, ssl.SSLContext]) -> None:
        with self.connected(secure) as client:
            assert client.ask(["GET / HTTP/1.1", "Host: x"]).status == 404
            client.ended()

    def test_older_versions_are_refused(self, secure: tuple[House, ssl.SSLContext]) -> None:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.set_ciphers("AES128-SHA")
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            self.connected((secure[0], old))

    def test_who_does_not_speak_it_is_cut_off(self, secure: tuple[House, ssl.SSLContext]) -> None:
        with secure[0].raw() as silent, secure[0].raw() as plain:
            plain.send(b"GET /v1/socket HTTP/1.1\r\n\r\n")
            plain.sock.recv(1)
            silent.cut_off()


def segments(sock: socket.socket) -> int:
    """How many segments with data this side has received: the kernel's `tcpi_data_segs_in`."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (count,) = struct.unpack_from("I", info, 152)
    assert isinstance(count, int)
    return count
