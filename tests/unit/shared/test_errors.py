"""One list of errors for the socket and for HTTP (protocol §4)."""

from __future__ import annotations

import pytest

from shared.errors import ERRORS, InternalError, from_code

TABLE = {
    "bad_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_member": 403,
    "not_found": 404,
    "client_msg_id_reused": 409,
    "conflict": 409,
    "too_large": 413,
    "moderated": 422,
    "rate_limited": 429,
    "internal": 500,
    "unavailable": 503,
    "timeout": 504,
}


def test_the_table_is_the_protocols() -> None:
    assert {code: kind.status for code, kind in ERRORS.items()} == TABLE


@pytest.mark.promise("protocol.4.indefinite")
def test_what_may_have_been_done_says_so() -> None:
    assert {code for code, kind in ERRORS.items() if not kind.definite} == {"internal", "unavailable", "timeout"}


def test_an_error_travels_by_its_code() -> None:
    for code in TABLE:
        error = from_code(code, "why", field="body.x", retry_after_ms=5)
        assert error.as_dict() == {"code": code, "message": "why", "field": "body.x", "retry_after_ms": 5}
    assert isinstance(from_code("unheard_of", "why"), InternalError)
    assert from_code("conflict", "why").as_dict() == {"code": "conflict", "message": "why"}
