import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ingest.items import item, items
from shared.errors import BadRequestError

GROUP = "0b9a1f4e-55a8-4c1e-9d5a-6f2f3f0f8b11"


def test_items_are_cut_out_as_they_came() -> None:
    assert items(b' {"events" : [ {"a" :1}, [ ] ,null], "more":1}') == [b'{"a" :1}', b"[ ]", b"null"]
    assert items(b'{"events":[]}') == []


def test_a_text_that_is_no_json_because_of_one_item_is_cut_up() -> None:
    assert items(b'{"events":[{"a":NaN},{"b":"]}"}]}') == [b'{"a":NaN}', b'{"b":"]}"}']


def test_a_broken_text_that_is_large_is_refused_as_a_whole() -> None:
    with pytest.raises(BadRequestError):
        items(b'{"events":[{"a":NaN,"b":"%b"}]}' % (b"x" * 1024 * 1024))


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([None, 1.5, "", "]", '"}', {"a": ["[", {}]}, [], [[1], "\\"]]), max_size=5),
    st.sampled_from([None, "NaN", '"\\ud800"', "[" * 2000 + "]" * 2000]),
    st.integers(0, 5),
)
def test_every_element_is_found_with_and_without_a_broken_one(
    values: list[object], broken: str | None, place: int
) -> None:
    texts = [json.dumps(value) for value in values]
    if broken is not None:
        texts.insert(place, broken)
    assert items(f'{{"events":[{",".join(texts)}]}}'.encode()) == [text.encode() for text in texts]


@given(st.binary(max_size=60))
def test_any_bytes_end_in_items_or_bad_request(raw: bytes) -> None:
    for text in (raw, b'{"events":[%b]}' % raw):
        try:
            for one in items(text):
                item(one)
        except BadRequestError:
            pass


def test_the_member_that_is_no_json_is_named() -> None:
    with pytest.raises(BadRequestError) as refused:
        item(b'{"conversation_id":"%b","client_msg_id":"one","body":{"a":NaN}}' % GROUP.encode())
    assert refused.value.field == "body"
