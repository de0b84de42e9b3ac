"""What Autobahn's fuzzing client asks of a server, group by group, over a real socket.

The numbers in the comments are the groups of its test suite. Compression (12, 13) is not offered.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from tests.wires import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    House,
    Raw,
    close,
    frame,
    house,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = (0, 1, 124, 125, 126, 127, 128, 65535, 65536, 65537)


@pytest.fixture(scope="module")
def server() -> Iterator[House]:
    with house() as made:
        yield made


@pytest.fixture
def client(server: House) -> Iterator[Raw]:
    with server.client() as made:
        yield made


def leaves(client: Raw) -> None:
    """The client closes as it should, and so does the server: all that came before was fine."""
    client.send(close(1000))
    assert client.closed() == (1000, "")


def pieces(data: bytes, size: int) -> list[bytes]:
    """A message's frames."""
    parts = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
    return [
        frame(TEXT if number == 0 else CONTINUATION, part, fin=number == len(parts) - 1)
        for number, part in enumerate(parts)
    ]


class TestFraming:  # 1
    def test_messages_of_every_size_come_back(self, client: Raw) -> None:
        for size in SIZES:
            client.send(frame(TEXT, b"*" * size))
            assert client.frame() == (TEXT, b"*" * size)
            client.send(frame(BINARY, b"\xfe" * size))
            assert client.frame() == (BINARY, b"\xfe" * size)
        leaves(client)

    @pytest.mark.parametrize("size", [997, 65_536])
    def test_a_message_in_many_segments(self, client: Raw, size: int) -> None:
        data = bytes(range(256)) * 1024
        client.chop(frame(BINARY, data), size)
        assert client.frame() == (BINARY, data)
        leaves(client)

    def test_frames_byte_by_byte(self, client: Raw) -> None:
        said = "Käse " * 20
        client.chop(text(said) + frame(BINARY, b"\x00" * 200) + text(""), 1)
        assert client.frame() == (TEXT, said.encode())
        assert client.frame() == (BINARY, b"\x00" * 200)
        assert client.frame() == (TEXT, b"")
        leaves(client)

    def test_many_messages_in_one_segment(self, client: Raw) -> None:
        client.send(b"".join(text(str(number)) for number in range(1000)))
        assert [client.frame().payload for _ in range(1000)] == [str(number).encode() for number in range(1000)]
        leaves(client)


class TestPings:  # 2
    @pytest.mark.parametrize("payload", [b"", b"Hello", b"\x00\xff\xfe\xfd", b"\xfe" * 125])
    def test_a_ping_is_answered_with_its_payload(self, client: Raw, payload: bytes) -> None:
        client.send(frame(PING, payload))
        assert client.frame() == (PONG, payload)
        leaves(client)

    def test_a_long_ping(self, client: Raw) -> None:
        client.send(frame(PING, b"\xfe" * 126))
        assert client.closed()[0] == 1002

    def test_a_ping_byte_by_byte(self, client: Raw) -> None:
        client.chop(frame(PING, b"\xfe" * 125), 1)
        assert client.frame() == (PONG, b"\xfe" * 125)
        leaves(client)

    @pytest.mark.parametrize("payload", [b"", b"unsolicited", b"\x00\x00\x00\x07"])
    def test_a_pong_to_no_ping_is_ignored(self, server: House, client: Raw, payload: bytes) -> None:
        client.send(frame(PONG, payload) + frame(PING, b"a ping"))
        assert client.frame() == (PONG, b"a ping")
        assert server.call(lambda: server.handlers[-1].wire.unanswered) == 0
        leaves(client)

    @pytest.mark.parametrize("size", [1, 10_000])
    def test_ten_pings(self, client: Raw, size: int) -> None:
        client.chop(b"".join(frame(PING, b"payload-%d" % number) for number in range(10)), size)
        assert [client.frame() for _ in range(10)] == [(PONG, b"payload-%d" % number) for number in range(10)]
        leaves(client)


class TestReserved:  # 3
    @pytest.mark.parametrize("rsv", range(1, 8))
    @pytest.mark.parametrize("opcode", [TEXT, BINARY, CLOSE, PING, PONG])
    def test_a_reserved_bit(self, client: Raw, rsv: int, opcode: int) -> None:
        client.send(text("before") + frame(opcode, b"", rsv=rsv) + frame(PING, b"never seen"))
        assert client.frame() == (TEXT, b"before")
        assert client.closed()[0] == 1002


class TestOpcodes:  # 4
    @pytest.mark.parametrize("opcode", [3, 4, 5, 6, 7, 11, 12, 13, 14, 15])
    @pytest.mark.parametrize("payload", [b"", b"reserved"])
    def test_an_unknown_opcode(self, client: Raw, opcode: int, payload: bytes) -> None:
        client.send(text("before") + frame(opcode, payload) + frame(PING, b"never seen"))
        assert client.frame() == (TEXT, b"before")
        assert client.closed()[0] == 1002


class TestFragments:  # 5
    @pytest.mark.parametrize("opcode", [PING, PONG])
    def test_a_control_frame_in_two_parts(self, client: Raw, opcode: int) -> None:
        client.send(frame(opcode, b"one", fin=False) + frame(CONTINUATION, b"two"))
        assert client.closed()[0] == 1002

    @pytest.mark.parametrize("opcode", [TEXT, BINARY])
    def test_a_message_in_two_parts(self, client: Raw, opcode: int) -> None:
        client.send(frame(opcode, b"one", fin=False) + frame(CONTINUATION, b"two"))
        assert client.frame() == (opcode, b"onetwo")
        leaves(client)

    @pytest.mark.parametrize("size", [1, 10_000])
    def test_control_frames_between_parts(self, client: Raw, size: int) -> None:
        client.chop(
            frame(TEXT, b"1", fin=False)
            + frame(PING, b"a")
            + frame(CONTINUATION, b"2", fin=False)
            + frame(PONG, b"b")
            + frame(CONTINUATION, b"", fin=False)
            + frame(PING, b"c")
            + frame(CONTINUATION, b"3"),
            size,
        )
        assert [client.frame() for _ in range(3)] == [(PONG, b"a"), (PONG, b"c"), (TEXT, b"123")]
        leaves(client)

    @pytest.mark.parametrize("fin", [True, False])
    def test_a_continuation_of_nothing(self, client: Raw, fin: bool) -> None:
        client.send(frame(CONTINUATION, b"nothing", fin=fin) + text("after"))
        assert client.closed()[0] == 1002

    def test_a_continuation_after_a_whole_message(self, client: Raw) -> None:
        client.send(text("whole") + frame(CONTINUATION, b"more"))
        assert client.frame() == (TEXT, b"whole")
        assert client.closed()[0] == 1002

    @pytest.mark.parametrize("opcode", [TEXT, BINARY])
    @pytest.mark.parametrize("fin", [True, False])
    def test_a_message_inside_a_message(self, client: Raw, opcode: int, fin: bool) -> None:
        client.send(frame(TEXT, b"one", fin=False) + frame(opcode, b"two", fin=fin))
        assert client.closed()[0] == 1002

    def test_empty_parts(self, client: Raw) -> None:
        client.send(frame(TEXT, fin=False) + frame(CONTINUATION, fin=False) + frame(CONTINUATION))
        assert client.frame() == (TEXT, b"")
        client.send(frame(TEXT, fin=False) + frame(CONTINUATION, b"middle", fin=False) + frame(CONTINUATION))
        assert client.frame() == (TEXT, b"middle")
        leaves(client)

    def test_two_messages_in_parts_one_after_the_other(self, client: Raw) -> None:
        client.send(b"".join(pieces("Käse".encode(), 1) + pieces(b"Brot", 3)))
        assert [client.frame() for _ in range(2)] == [(TEXT, "Käse".encode()), (TEXT, b"Brot")]
        leaves(client)


GREEK = "κόσμε"
VALID = (
    "Hello-µ@ßöäüàá-UTF-8!!",
    GREEK,
    "\x00",
    "\u0080",
    "\u0800",
    "\U00010000",
    "\u007f",
    "\u07ff",
    "\uffff",
    "\U0010ffff",
    "\ud7ff",
    "\ue000",
    "\ufffd",
    "\ufffe",
    "\U0001fffe",
    "\U0010fffe",
    "\ufeff at the beginning",
)
INVALID = {
    "truncated": GREEK.encode()[:-1],
    "a lone continuation byte": b"\x80",
    "all continuation bytes": bytes(range(0x80, 0xC0)),
    "lone leading bytes": b"\xc3 \xe0 \xf0 ",
    "overlong in 2": b"\xc0\xaf",
    "overlong in 3": b"\xe0\x80\xaf",
    "overlong in 4": b"\xf0\x80\x80\xaf",
    "overlong, the last of 2": b"\xc1\xbf",
    "overlong, the last of 3": b"\xe0\x9f\xbf",
    "overlong, the last of 4": b"\xf0\x8f\xbf\xbf",
    "overlong nothing": b"\xc0\x80",
    "the first high surrogate": b"\xed\xa0\x80",
    "the last low surrogate": b"\xed\xbf\xbf",
    "a pair of surrogates": b"\xed\xa0\x80\xed\xb0\x80",
    "above U+10FFFF": b"\xf4\x90\x80\x80",
    "of five": b"\xf8\x88\x80\x80\x80",
    "of six": b"\xfc\x84\x80\x80\x80\x80",
    "impossible bytes": b"\xfe\xff",
    "Autobahn's": b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce\xbc\xce\xb5\xed\xa0\x80edited",
}


class TestUtf8:  # 6
    def test_text_comes_back(self, client: Raw) -> None:
        for said in VALID:
            client.send(text(said))
            assert client.frame() == (TEXT, said.encode())
        leaves(client)

    def test_code_points_may_be_cut_by_parts_and_segments(self, client: Raw) -> None:
        for said in VALID:
            client.chop(b"".join(pieces(said.encode(), 1)), 3)
            assert client.frame() == (TEXT, said.encode())
        leaves(client)

    @pytest.mark.parametrize("data", INVALID.values(), ids=INVALID)
    def test_what_is_no_text(self, client: Raw, data: bytes) -> None:
        client.send(frame(TEXT, data))
        assert client.closed()[0] == 1007

    @pytest.mark.parametrize("data", INVALID.values(), ids=INVALID)
    def test_what_is_no_text_in_parts(self, client: Raw, data: bytes) -> None:
        client.send(b"".join(pieces(b"before " + data, 1)))
        assert client.closed()[0] == 1007

    @pytest.mark.parametrize("data", [b"\xf4\x90", b"\xed\xa0\x80", b"\xc0", b"before \xff"])
    def test_it_is_refused_before_the_message_is_complete(self, client: Raw, data: bytes) -> None:
        client.send(frame(TEXT, data, fin=False))
        assert client.closed()[0] == 1007

    def test_a_code_point_that_the_last_part_leaves_open(self, client: Raw) -> None:
        client.send(frame(TEXT, b"\xce", fin=False) + frame(CONTINUATION))
        assert client.closed()[0] == 1007

    def test_binary_may_be_anything(self, client: Raw) -> None:
        for data in INVALID.values():
            client.send(frame(BINARY, data))
            assert client.frame() == (BINARY, data)
        leaves(client)


class TestClosing:  # 7
    def test_with_and_without_reason(self, server: House) -> None:
        for reason in ("", "ok", "Grüße", "*" * 123):
            with server.client() as client:
                client.send(close(1000, reason.encode()))
                assert client.closed() == (1000, reason)

    def test_without_a_code(self, server: House, client: Raw) -> None:
        client.send(close(None))
        assert client.closed() == (None, "")
        server.wait(lambda: server.handlers[-1].ended == [1005])

    def test_the_handler_is_told_the_code_once(self, server: House, client: Raw) -> None:
        client.send(close(4321, b"bye"))
        assert client.closed() == (4321, "bye")
        server.wait(lambda: server.handlers[-1].ended == [4321])

    @pytest.mark.parametrize("code", [*range(1000, 1004), *range(1007, 1015), 3000, 3999, 4000, 4999])
    def test_codes_that_may_be(self, client: Raw, code: int) -> None:
        client.send(close(code))
        assert client.closed() == (code, "")

    @pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535])
    def test_codes_that_may_not(self, client: Raw, code: int) -> None:
        client.send(close(code))
        assert client.closed()[0] == 1002

    def test_half_a_code(self, client: Raw) -> None:
        client.send(frame(CLOSE, b"\x03"))
        assert client.closed()[0] == 1002

    def test_a_long_reason(self, client: Raw) -> None:
        client.send(frame(CLOSE, struct.pack("!H", 1000) + b"*" * 124))
        assert client.closed()[0] == 1002

    def test_a_reason_that_is_no_text(self, client: Raw) -> None:
        client.send(close(1000, INVALID["Autobahn's"]))
        assert client.closed()[0] == 1007

    @pytest.mark.parametrize("after", [close(1000), text("late"), frame(PING, b"late"), frame(3), b"\xff" * 100_000])
    def test_what_comes_after_the_close_is_not_looked_at(self, server: House, client: Raw, after: bytes) -> None:
        client.send(text("before") + close(1000) + after)
        assert client.frame() == (TEXT, b"before")
        assert client.closed() == (1000, "")
        client.sock.close()
        server.wait(lambda: server.handlers[-1].ended == [1000])
        assert server.handlers[-1].messages == ["before"]

    @pytest.mark.parametrize("size", [1, 1000])
    def test_inside_a_message(self, client: Raw, size: int) -> None:
        client.chop(frame(TEXT, b"one", fin=False) + close(1000) + frame(CONTINUATION, b"two"), size)
        assert client.closed() == (1000, "")

    def test_a_large_message_and_the_close(self, client: Raw) -> None:
        client.send(frame(BINARY, b"x" * 262_144) + close(1000))
        assert client.frame() == (BINARY, b"x" * 262_144)
        assert client.closed() == (1000, "")

    def test_a_client_that_leaves_without_a_word(self, server: House, client: Raw) -> None:
        client.sock.close()
        server.wait(lambda: server.handlers[-1].ended == [1006])


class TestLarge:  # 9, 10
    def test_up_to_the_limit(self, server: House, client: Raw) -> None:
        most = server.policy.first_message_bytes
        client.send(frame(TEXT, b"*" * most))
        assert client.frame() == (TEXT, b"*" * most)
        client.send(b"".join(pieces(b"*" * most, 65_536)))
        assert client.frame() == (TEXT, b"*" * most)
        leaves(client)

    def test_one_more_is_refused_by_its_header(self, server: House, client: Raw) -> None:
        client.send(frame(BINARY, b"*" * (server.policy.first_message_bytes + 1))[:14])
        assert client.closed()[0] == 1009

    def test_one_more_in_parts(self, server: House, client: Raw) -> None:
        client.send(b"".join(pieces(b"*" * (server.policy.first_message_bytes + 1), 200_000)))
        assert client.closed()[0] == 1009

    def test_a_length_that_nobody_has(self, client: Raw) -> None:
        client.send(b"\x82\xff" + b"\xff" * 8 + b"mask")
        assert client.closed()[0] == 1009

    def test_the_limit_may_change(self, server: House, client: Raw) -> None:
        client.send(frame(TEXT, b"*" * 5000))
        assert client.frame().payload == b"*" * 5000
        server.call(lambda: server.handlers[-1].wire.limit(100))
        client.send(frame(TEXT, b"*" * 100) + frame(TEXT, b"*" * 101))
        assert client.frame().payload == b"*" * 100
        assert client.closed()[0] == 1009

    def test_control_frames_have_a_limit_of_their_own(self, server: House, client: Raw) -> None:
        server.call(lambda: server.handlers[-1].wire.limit(10))
        client.send(frame(TEXT, b"*" * 10, fin=False) + frame(PING, b"*" * 125))
        assert client.frame() == (PONG, b"*" * 125)
        client.send(frame(CONTINUATION, b"*"))
        assert client.closed()[0] == 1009


@pytest.mark.parametrize("opcode", [TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG])
def test_a_client_must_mask_its_frames(client: Raw, opcode: int) -> None:
    client.send(frame(opcode, masked=False))
    assert client.closed()[0] == 1002


@pytest.mark.parametrize("data", [b"\x81\x00", b"\x83", b"\xc1", b"\x89\xfe", b"\x09"])
def test_two_bytes_are_enough_to_be_refused(client: Raw, data: bytes) -> None:
    client.send(data)
    assert client.closed()[0] == 1002
