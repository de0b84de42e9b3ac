from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.console.settings import ConsoleSettings


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYBILL_AUTH_SECRET", "secret")
    monkeypatch.setenv("WAYBILL_POSTGRES_URL", "postgres://waybill_console@127.0.0.1:1/waybill")


def test_services_are_names_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYBILL_CONSOLE_SERVICES", "gateway=http://127.0.0.1:1, gateway-2=http://127.0.0.1:2,")
    found = {name: str(url) for name, url in ConsoleSettings().console_services.items()}
    assert found == {"gateway": "http://127.0.0.1:1/", "gateway-2": "http://127.0.0.1:2/"}


def test_without_the_setting_all_five_are_looked_for_on_this_machine() -> None:
    assert set(ConsoleSettings().console_services) == {"ingest", "relay", "gateway", "receipts", "console"}


@pytest.mark.parametrize("value", ["gateway", "=http://127.0.0.1:1", "gateway=", "gateway=ftp://127.0.0.1"])
def test_a_wrong_value_names_the_setting(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WAYBILL_CONSOLE_SERVICES", value)
    with pytest.raises(ValidationError, match="console_services"):
        ConsoleSettings()
