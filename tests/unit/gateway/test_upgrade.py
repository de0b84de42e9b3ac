"""The short way through a handshake leads where the long one does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.upgrade import Answer, Asked, Policy, read, unusual, usual
from tests.wires import ACCEPT, REQUEST, changed, request

POLICY = Policy(origins=("https://app.test",))

NAMES = (
    "Host",
    "Upgrade",
    "Connection",
    "Sec-WebSocket-Key",
    "Sec-WebSocket-Version",
    "Sec-WebSocket-Protocol",
    "Origin",
    "Authorization",
    "X-Forwarded-For",
    "Content-Length",
    "Transfer-Encoding",
    "x-other",
    "bad name",
    "",
)
VALUES = (
    "websocket",
    "Upgrade",
    "keep-alive, Upgrade",
    "dGhlIHNhbXBsZSBub25jZQ==",
    "dGhlIHNhbXBsZSBub25jZR==",
    "dGhlIHNhbXBsZSBub25jZQ=",
    "13",
    "8",
    "waybill.v1",
    "waybill.v1, waybill.v2",
    "https://app.test",
    "https://evil.test",
    "Bearer a",
    " spaces\tinside and at the end \t",
    "0",
    "chunked",
    "",
    "ü",
    "\x00",
    "*" * 8185,
)
lines = st.builds("{}{}{}".format, st.sampled_from(NAMES), st.sampled_from([": ", ":", " : "]), st.sampled_from(VALUES))
changes = st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["add", "drop", "replace", "case"]), lines), max_size=3)


def headers(response: bytes) -> dict[str, str]:
    """Without `Date`, which one of the two leaves out, as it may before a message of its own."""
    first, *rest = response.decode().removesuffix("\r\n\r\n").split("\r\n")
    found = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
    found.pop("date", None)
    return found | {"": first}


def agree(head: bytes) -> bool:
    """Whether it goes the short way; if so, the long one says the same."""
    short = usual(head, POLICY)
    if short is None:
        return False
    long = unusual(head, POLICY)
    assert isinstance(long, Asked)
    assert headers(short.response) == headers(long.response)
    assert short[1:] == long[1:]
    return True


@pytest.mark.parametrize(
    "lines",
    [
        REQUEST,
        changed(Connection="Upgrade"),
        changed(Origin="https://app.test", Sec_WebSocket_Protocol="waybill.v1", Authorization="Bearer a"),
        changed(Sec_WebSocket_Extensions="permessage-deflate; client_max_window_bits", User_Agent="a  (b)"),
        [*REQUEST, "Authorization: Bearer a", "authorization:Bearer b", "X-Forwarded-For: 1.2.3.4"],
    ],
)
def test_what_clients_send_goes_the_short_way(lines: list[str]) -> None:
    head = request(lines)
    assert agree(head)
    asked = read(head, POLICY)
    assert isinstance(asked, Asked)
    assert headers(asked.response)["sec-websocket-accept"] == ACCEPT


@given(changes, st.sampled_from(["GET /v1/socket HTTP/1.1", "GET /v1/socket?a HTTP/1.1", "GET / HTTP/1.1", "x"]))
def test_no_other_is_accepted_the_short_way(made: list[tuple[int, str, str]], first: str) -> None:
    rest = list(REQUEST[1:])
    for where, change, line in made:
        at = where % (len(rest) + 1)
        if change == "add" or at >= len(rest):
            rest.insert(at, line)
        elif change == "drop":
            del rest[at]
        elif change == "case":
            rest[at] = rest[at].swapcase()
        else:
            rest[at] = line
    agree(request([first, *rest]))


def test_a_refusal_of_the_long_way_is_the_answer() -> None:
    answer = read(request(changed(Origin="https://evil.test")), POLICY)
    assert isinstance(answer, Answer)
    assert answer.status == 403
