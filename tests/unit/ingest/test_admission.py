import re
from pathlib import Path

import msgspec
import pytest

from services.ingest.admission import _REFUSALS, admit, creator, reader, refusal
from shared.auth import Claims
from shared.contracts.sends import SendItem
from shared.errors import BadRequestError, ForbiddenError, TooLargeError, WaybillError

KEY = b"a digest key for tests"
MIGRATION = Path(__file__).parents[3] / "deploy/migrations/0013_pre_timeline.sql"


def claims(scope: str = "user", subject: str = "ann") -> Claims:
    return Claims(subject, scope, None, 0)


def item(**fields: object) -> SendItem:
    made = {"conversation_id": "0B9A1F4E-55a8-4c1e-9d5a-6f2f3f0f8b11", "client_msg_id": "one", "body": {}} | fields
    return msgspec.json.decode(msgspec.json.encode(made), type=SendItem)


def test_every_refusal_of_the_store_has_an_error_and_no_other() -> None:
    sql = MIGRATION.read_text(encoding="utf-8")
    body = sql[sql.index("FUNCTION append_events") : sql.index("FUNCTION write_events")]
    names = set(re.findall(r"'((?:not_|forbidden_|conflict_|client_)[a-z_]+)'", body)) - {"client_msg_id"}
    assert names == set(_REFUSALS) - {"moderated"}
    assert {refusal(name).code for name in names} == {
        "not_found",
        "not_member",
        "forbidden",
        "conflict",
        "client_msg_id_reused",
    }
    assert all(refusal(name).definite for name in names)


@pytest.mark.promise("protocol.2.scopes")
@pytest.mark.parametrize(
    ("scope", "named", "kind", "expected"),
    [
        ("user", None, "message", ("ann", False)),
        ("user", "ann", "message", ("ann", False)),
        ("user", "bob", "message", ForbiddenError),
        ("user", None, "system", ("ann", False)),
        ("service", "bob", "message", ("bob", True)),
        ("service", None, "message", BadRequestError),
        ("service", None, "system", ("ann", True)),
        ("service", "bob", "system", ("bob", True)),
        ("gateway", "bob", "message", ("bob", False)),
        ("gateway", None, "message", BadRequestError),
        ("gateway", None, "system", BadRequestError),
        ("gateway", "bob", "system", ("bob", False)),
        ("admin", None, "message", ForbiddenError),
        ("admin", "ann", "message", ForbiddenError),
    ],
)
def test_who_speaks(scope: str, named: str | None, kind: str, expected: tuple[str, bool] | type[WaybillError]) -> None:
    asked = item(sender_id=named, type=kind) if named else item(type=kind)
    if isinstance(expected, tuple):
        made = admit(claims(scope), asked, digest_key=KEY)
        assert (made.draft.sender_id, made.as_service) == expected
    else:
        with pytest.raises(expected):
            admit(claims(scope), asked, digest_key=KEY)


@pytest.mark.promise("protocol.9.order_of_checks")
def test_shape_comes_before_who_speaks() -> None:
    with pytest.raises(BadRequestError):
        admit(claims(), item(sender_id="bob", target_seq=1), digest_key=KEY)
    with pytest.raises(TooLargeError):
        admit(claims(), item(sender_id="bob", body={"text": "too long"}), digest_key=KEY, max_body=10)


@pytest.mark.promise("protocol.1.ids")
def test_ids_are_written_in_lower_case() -> None:
    assert admit(claims(), item(), digest_key=KEY).draft.conversation_id == "0b9a1f4e-55a8-4c1e-9d5a-6f2f3f0f8b11"


def test_an_items_traceparent_beats_the_requests() -> None:
    own, other = f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-01"
    assert admit(claims(), item(traceparent=own), digest_key=KEY, traceparent=other).draft.traceparent == own
    assert admit(claims(), item(), digest_key=KEY, traceparent=other).draft.traceparent == other
    first, second = (admit(claims(), item(traceparent=one), digest_key=KEY) for one in (own, other))
    assert first.digest == second.digest


@pytest.mark.parametrize(("scope", "told"), [("gateway", "phone"), ("user", None), ("service", None)])
def test_a_device_is_the_gateways_to_tell(scope: str, told: str | None) -> None:
    named = "ann" if scope != "user" else None
    made = admit(claims(scope), item(sender_id=named, device_id="phone"), digest_key=KEY)
    assert made.device_id == told
    assert made.digest == admit(claims(scope), item(sender_id=named), digest_key=KEY).digest


def test_who_creates_and_reads() -> None:
    assert creator(claims(), None) == creator(claims(), "ann") == "ann"
    assert creator(claims("service"), "bob") == creator(claims("gateway"), "bob") == "bob"
    for scope, named, error in (
        ("user", "bob", ForbiddenError),
        ("service", None, BadRequestError),
        ("gateway", None, BadRequestError),
        ("admin", "ann", ForbiddenError),
    ):
        with pytest.raises(error):
            creator(claims(scope), named)
    assert reader(claims()) == "ann"
    assert reader(claims("service")) is None
    for scope in ("gateway", "admin"):
        with pytest.raises(ForbiddenError):
            reader(claims(scope))
