import json
import time
from collections.abc import Callable
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from shared.contracts.decode import at_fault, decode, elements, is_json, members
from shared.errors import BadRequestError


class Inner(msgspec.Struct):
    ranges: list[list[Annotated[int, Meta(ge=1)]]]


class Outer(msgspec.Struct):
    inner: Inner
    name: Annotated[str, Meta(max_length=3)] = ""


_DECODER = msgspec.json.Decoder(Outer)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"inner":{"ranges":[[1,2],[3,0]]}}', "inner.ranges.1.1"),
        ('{"inner":{"ranges":[5]}}', "inner.ranges.0"),
        ('{"inner":{}}', "inner.ranges"),
        ("{}", "inner"),
        ('{"inner":{"ranges":[]},"name":"long"}', "name"),
        ("[]", "whole"),
        ("", "whole"),
        ("{", "whole"),
        ('{"inner":NaN}', "whole"),
        ("[" * 5000, "whole"),
    ],
)
def test_the_field_is_named_by_its_dotted_path(text: str, field: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        decode(_DECODER, text, fallback="whole")
    assert refused.value.field == field
    assert "$" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"a":1,"b":[NaN,{"c":2}],"d":"x"}', {"a": b"1", "b": b'[NaN,{"c":2}]', "d": b'"x"'}),
        (b' { "a" : {"rid":1} , "rid" : "r" } ', {"a": b'{"rid":1}', "rid": b'"r"'}),
        (b'{"a":"}\\"{","rid":2}', {"a": b'"}\\"{"', "rid": b"2"}),
        (b'{"rid":"r","a":' + b"[" * 3000 + b"]" * 3000 + b"}", {"rid": b'"r"', "a": b"[" * 3000 + b"]" * 3000}),
        (b"{}", {}),
        (b"[]", {}),
        (b"", {}),
        (b"x", {}),
        (b'{"rid":"r","a":', {"rid": b'"r"'}),
        (b'{"rid":"r","a":"\\",}', {"rid": b'"r"'}),
        (b'{"rid":"r","a', {"rid": b'"r"'}),
        (b'{"rid":"r","a":"\\', {"rid": b'"r"'}),
        (b'{"rid":"r","\\ud800":1,"b":2}', {"rid": b'"r"'}),
    ],
)
def test_members(text: bytes, found: dict[str, bytes]) -> None:
    assert members(text) == found


@given(
    st.dictionaries(
        st.text(max_size=5), st.recursive(st.none() | st.text(max_size=5), st.lists, max_leaves=4), max_size=4
    )
)
def test_members_of_good_json(value: dict[str, object]) -> None:
    text = json.dumps(value).encode()
    assert {name: json.loads(part) for name, part in members(text).items()} == value


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"[]", []),
        (b" [ ] ", []),
        (b"[1]", [b"1"]),
        (b'[ 1 , [2,3], {"a":[4,5]}, "],[" ]', [b"1", b"[2,3]", b'{"a":[4,5]}', b'"],["']),
        (b"[NaN,1]", [b"NaN", b"1"]),
        (b"[1,]", [b"1", b""]),
        (b"[", None),
        (b"[[]", None),
        (b"]", None),
        (b"[1]]", None),
        (b"[1][2]", None),
        (b"{}", None),
        (b"5", None),
        (b"", None),
    ],
)
def test_elements(text: bytes, found: list[bytes] | None) -> None:
    assert elements(text) == found


@given(st.binary(max_size=50))
def test_any_bytes_are_cut_without_an_error(raw: bytes) -> None:
    members(raw)
    elements(raw)
    members(b'{"a":%b}' % raw)
    elements(b"[%b]" % raw)


def test_no_more_is_looked_at_than_allowed() -> None:
    text = b'{"a":1,"b":[2,3],"c":4}'
    assert members(text, most=14) == {"a": b"1", "b": b"[2,"}
    assert members(text, most=8) == {"a": b"1"}
    assert members(text, most=len(text)) == {"a": b"1", "b": b"[2,3]", "c": b"4"}


def test_the_member_at_fault() -> None:
    assert at_fault({"a": b"1", "b": b"NaN", "c": b"x"}) == "b"
    assert at_fault({"a": b"1", "b": b"[1,"}) == "b"
    assert at_fault({"a": b"1", "b": b"[1,"}, cut=True) is None
    assert at_fault({"a": b"[1,", "b": b"[1,"}, cut=True) == "a"
    assert at_fault({"a": b"1", "b": b"[NaN,1"}, cut=True) == "b"


def test_every_beginning_of_a_value_passes_as_cut() -> None:
    text = '{"a":[1,-2.5e+10,true,false,null,"é\\\\u00e9\\\\ud83d\\\\ude00"],"b":{"c":"d\\\\n"}}'.encode()
    assert all(is_json(text[:end], cut=True) for end in range(len(text)))
    assert not any(is_json(text[:end]) for end in range(len(text)))


HOSTILE = {
    "a string without an end, all escaped quotes": (b'{"a":"', b'\\"'),
    "escaped quotes outside of a string": (b'{"a":', b'\\"'),
    "backslashes": (b'{"a":"', b"\\"),
    "quotes": (b'{"a":', b'"'),
    "brackets and commas": (b'{"a":', b"[,"),
    "brackets": (b'{"a":', b"["),
    "objects": (b"", b'{"a":'),
    "a long word": (b'{"a":', b"x"),
    "spaces": (b'{"a":', b" "),
    "spaces and words": (b'{"a":', b" x"),
    "commas": (b"{", b","),
    "colons": (b'{"a"', b":"),
    "names": (b"{", b'"",'),
    "members": (b"{", b'"":1,'),
    "names with escapes": (b"{", b'"\\\\":1,'),
}


# Process time, the least of several: what else runs here does not count, and 24 times is three times what is linear. A
# quadratic walk takes 64 times as long.
@pytest.mark.parametrize("walk", [lambda text: members(text, most=len(text)), lambda text: elements(b"[" + text)])
@pytest.mark.parametrize(("head", "more"), HOSTILE.values(), ids=HOSTILE)
def test_the_cost_is_linear_whatever_the_text(walk: Callable[[bytes], object], head: bytes, more: bytes) -> None:
    def cost(size: int) -> float:
        text = head + more * (size // len(more))
        return min(_seconds(walk, text) for _ in range(3))

    # The clock's own steps and the call weigh nothing beside 20 µs.
    assert cost(32 * 1024) < 24 * max(cost(4 * 1024), 20e-6)


def _seconds(walk: Callable[[bytes], object], text: bytes) -> float:
    begun = time.process_time()
    walk(text)
    return time.process_time() - begun
