"""The reader of frames beside the one of `websockets`: the same bytes, however they come, mean the same to both."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from services.gateway.incoming import CLOSE, CONTINUATION, Control, Fault, Reader, close_code
from tests.wires import BINARY, PING, PONG, TEXT, close, frame, text

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST = 300
Heard = list[str | bytes | tuple[int, bytes] | int]
"""Messages, control frames, and at the end the code of a fault, if there was one."""


def ours(pieces: Iterable[bytes]) -> Heard:
    reader, heard = Reader(MOST), Heard()
    try:
        for piece in pieces:
            reader.feed(piece)
            while (taken := reader.take()) is not None:
                if not isinstance(taken, Control):
                    heard.append(taken)
                    continue
                opcode, payload = taken
                if opcode == CLOSE:
                    close_code(payload)
                if opcode != CONTINUATION:
                    heard.append((opcode, payload))
                if opcode == CLOSE:
                    return heard
    except Fault as fault:
        heard.append(fault.code)
    else:
        assert not reader.waiting
    return heard


def theirs(pieces: Iterable[bytes]) -> Heard:
    """What `websockets` hears; it leaves it to its user to join parts, to read text, and to add sizes up."""
    protocol, heard = ServerProtocol(state=State.OPEN, max_size=None), Heard()
    for piece in pieces:
        protocol.receive_data(piece)
    kind, parts = Opcode.TEXT, b""
    for event in protocol.events_received():
        if event.opcode in {Opcode.PING, Opcode.PONG, Opcode.CLOSE}:
            heard.append((int(event.opcode), bytes(event.data)))
            continue
        if event.opcode is not Opcode.CONT:
            kind, parts = event.opcode, b""
        parts += bytes(event.data)
        if len(parts) > MOST:
            return [*heard, 1009]
        try:
            said = parts.decode() if kind is Opcode.TEXT else parts
        except UnicodeDecodeError as error:
            if event.fin or error.reason != "unexpected end of data":
                return [*heard, 1007]
        else:
            if event.fin:
                heard.append(said)
    if protocol.close_rcvd is None and protocol.close_sent is not None:
        heard.append(protocol.close_sent.code)
    return heard


texts = st.text(max_size=80).map(str.encode)
payloads = st.one_of(texts, st.binary(max_size=200), st.sampled_from([b"*" * 125, b"*" * 126, b"*" * MOST, b"*" * 301]))
whole = st.builds(frame, st.sampled_from([TEXT, BINARY]), payloads)
control = st.builds(frame, st.sampled_from([PING, PONG]), st.binary(max_size=125))


@st.composite
def in_parts(draw: st.DrawFn) -> bytes:
    data, opcode = draw(payloads), draw(st.sampled_from([TEXT, BINARY]))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    parts = [data[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(data)])]
    last = len(parts) - 1
    made = [frame(CONTINUATION if number else opcode, part, fin=number == last) for number, part in enumerate(parts)]
    return b"".join(itertools.chain.from_iterable((draw(st.just(b"") | control), part) for part in made))


anything = st.builds(
    frame,
    st.integers(0, 15).filter(lambda opcode: opcode != CLOSE),
    st.binary(max_size=130),
    fin=st.booleans(),
    rsv=st.sampled_from([0, 0, 0, 0, 1, 4]),
    masked=st.sampled_from([True, True, True, True, False]),
)
closing = st.builds(close, st.none() | st.integers(0, 5001), texts.filter(lambda reason: len(reason) <= 123)).filter(
    lambda made: made[1] != 0x80 or len(made) == 6
)
ENDS = st.just(b"") | anything | closing


@given(st.lists(whole | control | in_parts(), max_size=6), ENDS, st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_both_hear_the_same(frames: list[bytes], end: bytes, sizes: list[int]) -> None:
    data, pieces = b"".join(frames) + end, []
    for size in itertools.cycle(sizes):
        if not data:
            break
        pieces.append(data[:size])
        data = data[size:]
    heard = ours(pieces)
    assert heard == theirs(pieces)
    assert heard == ours([b"".join(pieces)] if pieces else [])


def test_a_frame_that_comes_byte_by_byte_costs_no_more_the_longer_it_is() -> None:
    def seconds(size: int) -> float:
        reader, data = Reader(size), frame(BINARY, b"*" * size)
        begin = time.perf_counter()
        for at in range(len(data)):
            reader.feed(data[at : at + 1])
            if (taken := reader.take()) is not None:
                assert taken == b"*" * size
        return time.perf_counter() - begin

    assert min(seconds(160_000) for _ in range(2)) < 20 * min(seconds(20_000) for _ in range(3))


def test_nothing_is_kept_of_what_was_taken() -> None:
    reader, last = Reader(1000), text("next")
    reader.feed(text("*" * 100) * 10 + last[:7])
    for _ in range(10):
        assert reader.take() == "*" * 100
    assert reader.take() is None
    assert len(reader._data) == 7
    reader.feed(last[7:])
    assert reader.take() == "next"
    assert reader.take() is None
    assert (reader._data, reader.waiting) == (b"", False)


def test_a_client_cannot_make_it_keep_more_than_a_message() -> None:
    reader = Reader(1000)
    reader.feed(frame(BINARY, b"*" * 1000, fin=False))
    assert reader.take() == Control(CONTINUATION, b"*" * 1000)
    for _ in range(100):
        reader.feed(frame(CONTINUATION, fin=False))
        assert reader.take() == Control(CONTINUATION, b"")
    reader.feed(frame(CONTINUATION, b"*")[:6])
    with pytest.raises(Fault, match="more than 1000 bytes"):
        reader.take()
