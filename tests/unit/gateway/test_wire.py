"""The pure parts of the transport: frames that go out, and what a request says of its client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from services.gateway import outgoing
from services.gateway.addresses import client_of, is_trusted, networks, subscriber
from services.gateway.upgrade import Policy, later, split
from services.gateway.wire import ready

TRUSTED = networks(["10.0.0.0/8", "fd00::/8"])


def read(frames: bytes) -> list[tuple[Opcode, bytes]]:
    client = ClientProtocol(parse_uri("ws://localhost/"), state=State.OPEN, max_size=None)
    client.receive_data(frames)
    return [(event.opcode, bytes(event.data)) for event in client.events_received()]


@given(st.lists(st.binary(max_size=200) | st.sampled_from([b"*" * 65535, b"*" * 65536, b"*" * 100_000]), max_size=5))
def test_ready_frames_are_what_a_client_reads(payloads: list[bytes]) -> None:
    assert read(b"".join(map(ready, payloads))) == [(Opcode.TEXT, payload) for payload in payloads]


@given(st.integers(1000, 4999), st.text(max_size=200))
def test_a_close_frame_has_as_much_of_the_reason_as_fits(code: int, reason: str) -> None:
    made = outgoing.close(code, reason)
    assert int.from_bytes(made[2:4], "big") == code
    said = made[4:].decode()
    assert reason.startswith(said)
    assert len(said.encode()) <= 120
    assert said == reason or len(said.encode()) > 116


@given(st.integers(0, 2**40), st.integers(0, 2**31))
def test_a_pong_is_known_by_its_number(number: int, back: int) -> None:
    ((opcode, payload),) = read(outgoing.ping(number))
    assert opcode is Opcode.PING
    assert outgoing.behind(payload, number + back) == back


@pytest.mark.parametrize("payload", [b"", b"abc", b"abcde", b"*" * 125])
def test_a_foreign_pong_is_none_of_ours(payload: bytes) -> None:
    assert outgoing.behind(payload, 7) is None


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["198.51.100.7"], "192.0.2.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["6.6.6.6, 198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["6.6.6.6", "198.51.100.7,10.0.0.2"], "198.51.100.7"),
        ("10.0.0.1", ["198.51.100.7", "10.0.0.2"], "198.51.100.7"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["198.51.100.7, nonsense, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["198.51.100.7, "], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7:1234"], "10.0.0.1"),
        ("10.0.0.1", ["2001:DB8::1"], "2001:db8::1"),
        ("fd00::1", ["2001:db8::1"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["::ffff:198.51.100.7"], "198.51.100.7"),
        ("", ["198.51.100.7"], ""),
    ],
)
def test_whom_the_trusted_proxies_name(peer: str, forwarded: list[str], client: str) -> None:
    assert client_of(peer, forwarded, TRUSTED) == client


def test_without_trusted_proxies_nobody_names_anybody() -> None:
    assert client_of("10.0.0.1", ["198.51.100.7"], ()) == "10.0.0.1"
    assert not is_trusted("10.0.0.1", ())


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("a:b", "a:b"),
    ],
)
def test_under_what_an_address_is_counted(address: str, counted: str) -> None:
    assert subscriber(address) == counted


@given(st.lists(st.integers(1, 7), min_size=1, max_size=60))
def test_the_end_of_a_request_is_found_however_it_comes(sizes: list[int]) -> None:
    data = b"GET / HTTP/1.1\r\nA: b\r\n\r\nwhat comes next\r\n\r\n"
    wanted = data.index(b"\r\n\r\n") + 4
    head = bytearray()
    for size in sizes:
        before = len(head)
        head += data[before : before + size]
        end = split(head, before, 1000)
        assert end == (wanted if len(head) >= wanted else None)
        if end is not None:
            break


@pytest.mark.parametrize("head", [b"x" * 11, b"1234567\r\n\r\n"])
def test_a_request_that_is_too_long(head: bytes) -> None:
    with pytest.raises(OverflowError):
        split(bytearray(head), 0, 10)
    assert split(bytearray(b"123456\r\n\r\n"), 0, 10) == 10


def test_not_now_says_when() -> None:
    assert later(503, "x", Policy(retry_after_s=9)).headers == (("Retry-After", "9"),)
