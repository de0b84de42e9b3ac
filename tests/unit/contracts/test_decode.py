import json
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from shared.contracts.decode import decode, elements, members
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
