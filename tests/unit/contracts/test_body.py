import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.body import MAX_BYTES, digest, parse
from shared.errors import BadRequestError, TooLargeError

KEY = b"a key of sixteen bytes or more"

_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)
_objects = st.dictionaries(_text, _json, max_size=4)


def same(one: str, other: str) -> bool:
    digests = {digest(KEY, "message", None, parse(text.encode())) for text in (one, other)}
    return len(digests) == 1


@pytest.mark.promise("protocol.1.body_value")
def test_the_text_is_kept_as_it_came_without_surrounding_space() -> None:
    text = '{ "b":1.0 ,"a" :[1e400,"\\u00e9\\/"]}'
    assert parse(f" \t\r\n{text}\n".encode()).text == text


@pytest.mark.promise("protocol.1.body_refused")
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x",
        b"null",
        b"[]",
        b'"a"',
        b"5",
        b"{",
        b"{}{}",
        b"{}x",
        b"{'a':1}",
        b'{"a":1,}',
        b'{"a":01}',
        b'{"a":+1}',
        b'{"a":.5}',
        b'{"a":NaN}',
        b'{"a":[Infinity]}',
        b'{"a":{"b":-Infinity}}',
        b'{"a":1,"a":2}',
        b'{"a":1,"\\u0061":2}',
        b'{"x":[{"a":1,"a":1}]}',
        b'{"a":"\\u0000"}',
        b'{"a":["x",{"b":"\\u0000"}]}',
        b'{"\\u0000":1}',
        b'{"a":"\0"}',
        b'{"a":"\n"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\\udc00"}',
        b'{"a":"\\udc00\\ud800"}',
        b'{"\\ud83d":1}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\xff"}',
        b'{"a":"\\x"}',
        b'{"a":"\\u12"}',
        '{"a":"\ufeff"'.encode(),
        "\ufeff{}".encode(),
        b'{"a":' * 65 + b"1" + b"}" * 65,
        b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
        b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"a":' * 10_000,
    ],
)
def test_refused(raw: bytes) -> None:
    with pytest.raises(BadRequestError) as refused:
        parse(raw)
    assert refused.value.field == "body"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"":null}',
        '{"a":"\\\\u0000"}',
        '{"a":"\\\\\\\\u0000 and \\\\ud800"}',
        '{"a":"\\ud83d\\ude00"}',
        '{"a":1e999999,"b":-0,"c":123456789012345678901234567890}',
        '{"a":' * 64 + "1" + "}" * 64,
        '{"a":"' + "[{" * 100 + '"}',
        json.dumps({"a": [{"b": 1}] * 100}),
    ],
)
def test_taken(text: str) -> None:
    assert parse(text.encode()).text == text


def test_a_deep_text_of_many_brackets_in_strings_is_measured_right() -> None:
    parse(b'{"a":"' + b"{" * 100 + b'","b":' + b"[" * 62 + b"]" * 62 + b"}")
    with pytest.raises(BadRequestError):
        parse(b'{"a":"\\"' + b"{" * 100 + b'","b":' + b"[" * 64 + b"]" * 64 + b"}")


@pytest.mark.promise("protocol.1.body_size")
def test_size_is_of_utf_8_bytes_without_surrounding_space() -> None:
    fits = b'{"a":"' + b"x" * (MAX_BYTES - 8) + b'"}'
    assert len(parse(b"  " + fits + b"  ").text) == MAX_BYTES
    for larger in (fits.replace(b"x", b"xx", 1), fits.replace(b"x", "é".encode(), 1)):
        with pytest.raises(TooLargeError) as refused:
            parse(larger)
        assert refused.value.field == "body"


def test_get_str() -> None:
    body = parse(b'{"a":"x","b":1,"c":null,"d":true,"e":""}')
    assert body.get_str("a") == "x"
    assert body.get_str("e") == ""
    assert body.get_str("missing") is None
    for name in "bcd":
        with pytest.raises(BadRequestError) as refused:
            body.get_str(name)
        assert refused.value.field == f"body.{name}"


@pytest.mark.promise("I2")
@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ('{"a":1,"b":2}', '{ "b" : 2, "a" : 1 }', True),
        ('{"a":{"x":1,"y":[1,2]}}', '{"a":{"y":[1,2],"x":1}}', True),
        ('{"a":"é"}', '{"a":"\\u00e9"}', True),
        ('{"a":"/"}', '{"a":"\\/"}', True),
        ('{"a":"😀"}', '{"a":"\\ud83d\\ude00"}', True),
        ('{"a":1}', '{"a":1.0}', False),
        ('{"a":1}', '{"a":"1"}', False),
        ('{"a":1e2}', '{"a":100}', False),
        ('{"a":0}', '{"a":-0}', False),
        ('{"a":null}', "{}", False),
        ('{"a":[1,2]}', '{"a":[2,1]}', False),
        ('{"a":"x"}', '{"a":"X"}', False),
        ('{"a":true}', '{"a":"true"}', False),
        ('{"é":1}', '{"e\\u0301":1}', False),
    ],
)
def test_sameness_is_of_the_json_value(one: str, other: str, expected: bool) -> None:
    assert same(one, other) is expected


@pytest.mark.promise("I2")
def test_sameness_covers_type_and_target_and_needs_the_key() -> None:
    body = parse(b"{}")
    digests = {
        digest(KEY, "message", None, body),
        digest(KEY, "system", None, body),
        digest(KEY, "edit", 1, body),
        digest(KEY, "edit", 11, body),
        digest(KEY, "recall", 1, None),
        digest(KEY, "delete", 1, None),
        digest(b"another key of sixteen bytes", "message", None, body),
    }
    assert len(digests) == 7
    assert {len(one) for one in digests} == {16}


@given(_objects, _objects, st.booleans(), st.sampled_from([None, 1]))
def test_two_texts_are_the_same_if_and_only_if_their_values_are(
    one: dict[str, object], other: dict[str, object], ascii_only: bool, indent: int | None
) -> None:
    plain = json.dumps(one, ensure_ascii=False)
    turned = json.dumps(dict(reversed(one.items())), ensure_ascii=ascii_only, indent=indent)
    assert same(plain, turned)
    # Python says 1 == 1.0 == True; JSON text does not.
    assert same(plain, json.dumps(other)) == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


@given(st.binary(max_size=40))
def test_any_bytes_are_taken_or_refused(raw: bytes) -> None:
    for text in (raw, b'{"a":"%b"}' % raw, b'{"a":%b}' % raw):
        try:
            parsed = parse(text)
        except BadRequestError:
            continue
        assert json.loads(parsed.text) is not None
        assert parsed.canonical.decode()
