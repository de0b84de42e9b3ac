from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from deploy.local import endpoints
from deploy.local.endpoints import Endpoints

if TYPE_CHECKING:
    from pathlib import Path

ENDPOINTS = Endpoints(
    gateway="http://127.0.0.1:8400",
    ingest="http://127.0.0.1:8401",
    console="http://127.0.0.1:8402",
    private={"gateway": "http://127.0.0.1:9400"},
    postgres="postgres://waybill@127.0.0.1:1/waybill",
    kafka="127.0.0.1:2",
    redis="redis://127.0.0.1:3/0",
    auth_secret="of-thirty-two-characters-or-more-x",
    pids={"gateway": [10, 11], "ingest": 12},
)


@pytest.mark.promise("protocol.8.up")
def test_it_is_written_and_read_whole(tmp_path: Path) -> None:
    file = tmp_path / endpoints.FILE
    endpoints.write(file, ENDPOINTS)
    endpoints.write(file, ENDPOINTS)
    assert endpoints.read(file) == ENDPOINTS
    assert [path.name for path in tmp_path.iterdir()] == [endpoints.FILE]


@pytest.mark.promise("protocol.8.up")
def test_one_gateway_writes_exactly_what_the_protocol_names(tmp_path: Path) -> None:
    endpoints.write(tmp_path / "one", ENDPOINTS)
    names = ["gateway", "ingest", "console", "private", "postgres", "kafka", "redis", "auth_secret", "pids"]
    assert list(json.loads((tmp_path / "one").read_text())) == names
    several = msgspec.structs.replace(ENDPOINTS, gateways=["a", "b"], gateways_private=["c", "d"])
    endpoints.write(tmp_path / "two", several)
    assert endpoints.read(tmp_path / "two") == several


def test_only_its_owner_may_read_the_secret(tmp_path: Path) -> None:
    file = tmp_path / endpoints.FILE
    file.write_text("before")
    file.chmod(0o666)
    endpoints.write(file, ENDPOINTS)
    assert file.stat().st_mode & 0o777 == 0o600


def test_pids_are_lists_where_several_serve() -> None:
    assert ENDPOINTS.pids_of("gateway") == [10, 11]
    assert ENDPOINTS.pids_of("ingest") == [12]
    with pytest.raises(KeyError):
        ENDPOINTS.pids_of("kafka")


def test_the_socket_is_the_gateways() -> None:
    assert ENDPOINTS.socket == "ws://127.0.0.1:8400/v1/socket"


@pytest.mark.parametrize("content", ["", "{", "{}", '{"gateway": 1}'])
def test_another_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / endpoints.FILE
    file.write_text(content)
    with pytest.raises(ValueError, match=endpoints.FILE):
        endpoints.read(file)
