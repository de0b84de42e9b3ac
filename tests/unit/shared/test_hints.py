"""Hints keep their shape on the wire."""

import json

import msgspec
import pytest

from shared import hints


def test_a_revocation_keeps_its_names() -> None:
    hint = hints.Revocation(user_id="ann", device_id="phone", jti=None, before=1_700_000_000.25)
    message = hints.encode(hint)
    assert json.loads(message) == {"user_id": "ann", "device_id": "phone", "jti": None, "before": 1_700_000_000.25}
    assert hints.decode(message) == hint
    assert hints.decode(b'{"user_id": "ann", "before": 1, "more": []}') == hints.Revocation(user_id="ann", before=1.0)


@pytest.mark.parametrize("message", [b"", b"{}", b"[]", b'{"user_id": 1, "before": 1}', b'{"user_id": "ann"}', b"\xff"])
def test_what_is_none_is_refused(message: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        hints.decode(message)
