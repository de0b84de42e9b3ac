"""A wrong setting names its variable and stops the start; its value is not shown."""

from __future__ import annotations

import pytest

from services.gateway.settings import GatewaySettings
from services.relay.settings import RelaySettings
from shared.settings import load

GOOD = {
    "WAYBILL_POSTGRES_URL": "postgres://waybill_gateway@127.0.0.1/waybill",
    "WAYBILL_KAFKA_BOOTSTRAP": "127.0.0.1:9092",
    "WAYBILL_REDIS_URL": "redis://127.0.0.1/0",
    "WAYBILL_AUTH_SECRET": "s3cret",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)


def test_defaults_are_the_protocols() -> None:
    settings = load(GatewaySettings)
    told = (settings.gateway_frame_bytes, settings.gateway_window, settings.gateway_resend_s, settings.gateway_resends)
    assert told == (96 * 1024, 256, 5, 5)
    assert (settings.gateway_heartbeat_s, settings.gateway_hello_s, settings.gateway_send_timeout_s) == (25, 10, 5)
    assert settings.gateway_port == 8400
    assert "s3cret" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WAYBILL_GATEWAY_WINDOW", "many-s3cret"),
        ("WAYBILL_GATEWAY_RESEND_S", "0"),
        ("WAYBILL_POSTGRES_URL", "mysql://s3cret@x"),
        ("WAYBILL_LOG_LEVEL", "s3cret"),
        ("WAYBILL_TOPIC_PREFIX", "a b"),
    ],
)
def test_a_wrong_value_names_the_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        load(GatewaySettings)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert name in told
    assert "s3cret" not in told


@pytest.mark.parametrize("name", ["WAYBILL_POSTGRES_URL", "WAYBILL_KAFKA_BOOTSTRAP", "WAYBILL_AUTH_SECRET"])
def test_a_missing_value_names_the_variable(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(SystemExit):
        load(GatewaySettings)
    assert name in capsys.readouterr().err


def test_a_lease_that_is_too_short_spells_out_the_sum(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAYBILL_RELAY_SENDING_STALE_MS", "8500")
    with pytest.raises(SystemExit):
        load(RelaySettings)
    told = capsys.readouterr().err
    assert "WAYBILL_RELAY_SENDING_STALE_MS" in told
    assert "9000 ms" in told
