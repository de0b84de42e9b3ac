import pytest

from services.ingest.settings import IngestSettings
from shared.settings import load

ENVIRONMENT = {
    "WAYBILL_POSTGRES_URL": "postgres://waybill_ingest@127.0.0.1/waybill",
    "WAYBILL_AUTH_SECRET": "secret",
    "WAYBILL_DIGEST_KEY": "0123456789abcdef",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_defaults(environment: pytest.MonkeyPatch) -> None:
    found = load(IngestSettings)
    assert (found.ingest_port, found.ingest_private_port) == (8401, 9401)
    assert found.ingest_lanes == 4
    assert found.moderation_url is None
    assert (found.moderation_timeout_ms, found.moderation_when_away) == (500, "closed")
    assert "0123456789abcdef" not in repr(found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WAYBILL_DIGEST_KEY", "0123456789abcde"),
        ("WAYBILL_INGEST_LANES", "0"),
        ("WAYBILL_INGEST_QUEUE_ITEMS", "499"),
        ("WAYBILL_INGEST_EDIT_WINDOW_S", "inf"),
        ("WAYBILL_INGEST_RECALL_WINDOW_S", "1e12"),
        ("WAYBILL_MODERATION_URL", "not a url"),
        ("WAYBILL_MODERATION_WHEN_AWAY", "perhaps"),
        ("WAYBILL_POSTGRES_POOL", "4"),
    ],
)
def test_a_wrong_value_names_its_variable_and_stops_the_start(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    environment.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        load(IngestSettings)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert name in said
    assert value not in said.replace(name, "") or len(value) < 5
