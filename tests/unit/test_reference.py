"""The generated reference is what the code says now."""

from __future__ import annotations

import pytest

from deploy import reference


@pytest.mark.parametrize("name", reference.pages())
def test_a_page_is_as_the_code_says(name: str) -> None:
    committed = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert committed == reference.pages()[name], "run `make docs`"
