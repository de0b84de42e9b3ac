import pytest

from services.relay.settings import RelaySettings
from shared.settings import load


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYBILL_POSTGRES_URL", "postgres://waybill_relay@127.0.0.1/waybill")
    monkeypatch.setenv("WAYBILL_KAFKA_BOOTSTRAP", "127.0.0.1:9092")


def test_the_defaults_are_those_that_people_know() -> None:
    settings = RelaySettings()
    assert settings.relay_batch_size == 500
    assert settings.relay_sending_stale_ms == 15_000
    assert settings.relay_fixed_delay_ms == 10
    assert settings.relay_private_port == 9403
    assert settings.relay_owner != RelaySettings().relay_owner


def test_a_lease_that_a_delivery_can_outlast_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAYBILL_RELAY_SENDING_STALE_MS", "8000")
    with pytest.raises(SystemExit) as stopped:
        load(RelaySettings)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "WAYBILL_RELAY_SENDING_STALE_MS" in told
    assert "8000 (WAYBILL_RELAY_DELIVERY_TIMEOUT_MS" in told
    assert "= 9000 ms" in told
