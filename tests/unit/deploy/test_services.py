from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from deploy.local import services
from deploy.local.ports import HOST
from deploy.local.secret_files import kept
from deploy.local.services import PortTakenError, Service, choose_ports, names, plan

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Stores:
    postgres_url: str = "postgres://waybill@127.0.0.1:1/waybill?sslmode=disable"
    kafka: str = "127.0.0.1:2"
    redis: str = "redis://127.0.0.1:3/0"


def planned(tmp_path: Path, gateways: int = 1, **base: str) -> dict[str, Service]:
    ports = choose_ports("auto", tmp_path / "ports", gateways)
    made = plan(Stores(), ports, gateways=gateways, secret="secret", digest_key="digest", base=base)
    return {service.name: service for service in made}


def test_each_service_has_its_own_role_and_nothing_of_another(tmp_path: Path) -> None:
    for name, service in planned(tmp_path).items():
        url = f"postgres://waybill_{name}@127.0.0.1:1/waybill?sslmode=disable"
        assert service.environment["WAYBILL_POSTGRES_URL"] == url
        assert service.argv[-1] == f"services.{name}.main"
        assert service.private.endswith(service.environment[f"WAYBILL_{name.upper()}_PRIVATE_PORT"])
        assert ("WAYBILL_DIGEST_KEY" in service.environment) == (name == "ingest")


def test_the_users_settings_are_passed_on_but_do_not_move_an_address(tmp_path: Path) -> None:
    made = planned(tmp_path, WAYBILL_LOG_LEVEL="debug", WAYBILL_GATEWAY_PORT="1", WAYBILL_KAFKA_BOOTSTRAP="elsewhere:9")
    gateway = made["gateway"].environment
    assert gateway["WAYBILL_LOG_LEVEL"] == "debug"
    assert gateway["WAYBILL_GATEWAY_PORT"] != "1"
    assert gateway["WAYBILL_KAFKA_BOOTSTRAP"] == "127.0.0.1:2"


def test_a_relay_keeps_its_name_over_its_lives(tmp_path: Path) -> None:
    assert planned(tmp_path)["relay"].environment["WAYBILL_RELAY_OWNER"] == "relay-1"


def test_several_gateways_have_names_and_ports_of_their_own(tmp_path: Path) -> None:
    made = planned(tmp_path, gateways=3)
    assert list(made) == ["gateway", "gateway-2", "gateway-3", "ingest", "receipts", "relay", "console"]
    gateways = [service for service in made.values() if service.kind == "gateway"]
    for variable in ("WAYBILL_GATEWAY_PORT", "WAYBILL_GATEWAY_PRIVATE_PORT", "WAYBILL_GATEWAY_NAME"):
        assert len({service.environment[variable] for service in gateways}) == 3
    assert made["console"].environment["WAYBILL_CONSOLE_SERVICES"].count("gateway") == 3


@pytest.mark.promise("protocol.8.up")
def test_fixed_ports_are_those_of_the_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "is_free", lambda _: True)
    ports = choose_ports("fixed", tmp_path / "ports", 1)
    assert {name: ports[name] for name in ("gateway", "ingest", "console")} == {
        "gateway": 8400,
        "ingest": 8401,
        "console": 8402,
    }
    assert sorted(port for name, port in ports.items() if name.endswith("_private")) == [*range(9400, 9405)]


@pytest.mark.promise("protocol.8.up")
def test_a_folder_keeps_its_automatic_ports(tmp_path: Path) -> None:
    first = choose_ports("auto", tmp_path / "ports", 1)
    assert choose_ports("auto", tmp_path / "ports", 1) == first
    assert len(set(first.values())) == 8
    more = choose_ports("auto", tmp_path / "ports", 2)
    assert more.items() > first.items()


def test_an_automatic_port_that_somebody_took_is_changed_alone(tmp_path: Path) -> None:
    first = choose_ports("auto", tmp_path / "ports", 1)
    with closing(socket.socket()) as taken:
        taken.bind((HOST, first["ingest"]))
        taken.listen()
        second = choose_ports("auto", tmp_path / "ports", 1)
    assert {name for name in first if first[name] != second[name]} == {"ingest"}


def test_a_fixed_port_that_is_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "is_free", lambda port: port != 8401)
    with pytest.raises(PortTakenError, match=r"8401 of ingest .* --ports auto"):
        choose_ports("fixed", tmp_path / "ports", 1)


def test_names_begin_with_what_is_stopped_first() -> None:
    assert names(1) == ["gateway", "ingest", "receipts", "relay", "console"]


def test_a_secret_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    first = kept(file)
    assert kept(file) == first
    assert len(first) >= 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept(tmp_path / "other") != first
