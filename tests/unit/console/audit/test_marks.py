from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console.audit.command import line
from services.console.audit.findings import MOST_TOLD, Finding, Report, readable
from services.console.audit.marks import Key, Scope, complete, scope_of
from shared.errors import BadRequestError
from shared.postgres import to_multirange
from shared.ranges import OPEN, RangeSet

_keys = st.builds(Key, st.integers(0, 5).map(lambda number: UUID(int=number)), st.sampled_from(["a", "b", "c"]))


@given(st.sets(_keys), st.dictionaries(_keys, st.integers(1, 9)), st.integers(1, 6))
def test_pages_hold_every_key_once_and_in_order(marks: set[Key], devices: dict[Key, int], most: int) -> None:
    pages: list[list[Key]] = []
    after = Key(UUID(int=0), "")
    while True:
        rows = sorted(key for key, count in devices.items() for _ in range(count) if key > after)[:most]
        page = complete(sorted(key for key in marks if key > after)[:most], rows, most)
        if not page:
            break
        pages.append(page)
        after = page[-1]
    assert [key for page in pages for key in page] == sorted(marks | devices.keys())


def test_a_scope_is_checked() -> None:
    id_ = UUID(int=7)
    assert scope_of(str(id_).upper(), "anna") == Scope(id_, "anna")
    for given_, field in (("7", None), (None, "a b")):
        with pytest.raises(BadRequestError) as error:
            scope_of(given_, field)
        assert error.value.field == ("conversation" if given_ else "user")


def test_ranges_are_told_with_inclusive_ends() -> None:
    assert readable(to_multirange(RangeSet([(1, 3), (6, 6), (9, OPEN)]))) == "1-3 6 9-"
    assert readable(to_multirange(RangeSet())) == ""
    assert readable("7") == "7"
    assert readable(None) is None


def test_a_report_counts_all_and_tells_the_first() -> None:
    report = Report()
    for number in range(MOST_TOLD + 5):
        kind = "union_ahead" if number == 0 else "mark_behind"
        report.add(Finding(kind=kind, conversation_id="c", mended=number == 1))
    assert (report.left, report.mended) == (MOST_TOLD + 3, {"mark_behind": 1})
    assert len(report.found) == MOST_TOLD
    assert report.differences["mark_behind"] == MOST_TOLD + 4


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (Finding(kind="mark_behind", conversation_id="c", user_id="anna", found="4", wanted="6", mended=True),
         "mark_behind: c anna: 4 should be 6, mended"),
        (Finding(kind="union_behind", conversation_id="c", user_id="anna", wanted="5-6", mended=False),
         "union_behind: c anna: lacks 5-6"),
        (Finding(kind="beyond_head", conversation_id="c", user_id="anna", device_id="tv", found="9", mended=False),
         "beyond_head: c anna on tv: 9"),
        (Finding(kind="count_wrong", conversation_id="c", bucket=0, found="5", wanted="0", mended=False),
         "count_wrong: c bucket 0: 5 should be 0"),
    ],
)  # fmt: skip
def test_a_difference_is_told_on_one_line(finding: Finding, text: str) -> None:
    assert line(finding) == text
