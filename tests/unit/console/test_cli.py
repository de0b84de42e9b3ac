from __future__ import annotations

from typing import TYPE_CHECKING

import jwt
import pytest
from typer.testing import CliRunner

from deploy.local import endpoints
from services.console.cli import app
from tests.unit.deploy.test_endpoints import ENDPOINTS

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "secret-of-thirty-two-characters-x"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.delenv("WAYBILL_AUTH_SECRET", raising=False)
    monkeypatch.chdir(tmp_path)
    return CliRunner()


@pytest.mark.promise("protocol.2.command")
def test_token_prints_the_token_alone(runner: CliRunner) -> None:
    done = runner.invoke(
        app,
        ["token", "ada", "--scope", "service", "--ttl", "120", "--device", "phone-1"],
        env={"WAYBILL_AUTH_SECRET": SECRET},
    )
    assert done.exit_code == 0
    assert done.stdout.count("\n") == 1
    claims = jwt.decode(done.stdout.strip(), SECRET, algorithms=["HS256"])
    assert (claims["sub"], claims["scope"], claims["device"]) == ("ada", "service", "phone-1")


@pytest.mark.promise("protocol.2.command")
def test_token_takes_the_secret_of_a_running_stack(runner: CliRunner, tmp_path: Path) -> None:
    endpoints.write(tmp_path / endpoints.FILE, ENDPOINTS)
    done = runner.invoke(app, ["token", "ada", "--state", str(tmp_path)])
    assert done.exit_code == 0
    claims = jwt.decode(done.stdout.strip(), ENDPOINTS.auth_secret, algorithms=["HS256"])
    assert claims["scope"] == "user"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["token", "ada"], "WAYBILL_AUTH_SECRET"),
        (["token", "a b"], "the user must be"),
        (["token", "ada", "--device", "x" * 65], "the device must be"),
    ],
)
def test_errors_go_to_standard_error_with_a_code(runner: CliRunner, arguments: list[str], what: str) -> None:
    done = runner.invoke(app, arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert what in done.stderr


@pytest.mark.parametrize("arguments", [["token", "ada", "--scope", "gateway"], ["serve", "kafka"], ["nothing"]])
def test_what_is_not_there_is_a_usage_error(runner: CliRunner, arguments: list[str]) -> None:
    done = runner.invoke(app, arguments, env={"WAYBILL_AUTH_SECRET": SECRET})
    assert done.exit_code == 2
    assert done.stdout == ""


def test_migrate_names_the_variable_that_is_missing(runner: CliRunner) -> None:
    done = runner.invoke(app, ["migrate"], env={"WAYBILL_POSTGRES_OWNER_URL": ""})
    assert done.exit_code == 2
    assert "WAYBILL_POSTGRES_OWNER_URL" in done.stderr


def test_migrate_of_a_store_that_is_away_fails(runner: CliRunner) -> None:
    url = "postgres://nobody@127.0.0.1:1/none"
    done = runner.invoke(app, ["migrate"], env={"WAYBILL_POSTGRES_OWNER_URL": url})
    assert done.exit_code == 1
    assert done.stderr.startswith("waybill: ")


@pytest.mark.parametrize(
    ("arguments", "module", "passed"),
    [
        (["up", "--ports", "auto", "--help"], "deploy.local.up", ["--ports", "auto", "--help"]),
        (["bench", "send", "--json"], "bench.run", ["send", "--json"]),
        (["serve", "relay"], "services.relay.main", []),
    ],
)
def test_what_runs_services_becomes_a_program_of_its_own(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, arguments: list[str], module: str, passed: list[str]
) -> None:
    started: list[list[str]] = []

    def execv(_: str, argv: list[str]) -> None:
        started.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", execv)
    assert runner.invoke(app, arguments).exit_code == 0
    assert started[0][1:] == ["-P", "-m", module, *passed]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["dead", "list"], "WAYBILL_POSTGRES_URL"),
        (["dead", "show", "1"], "WAYBILL_POSTGRES_URL"),
        (["dead", "retry", "1"], "WAYBILL_POSTGRES_URL"),
        (["dead", "discard", "1", "--reason", "x"], "WAYBILL_POSTGRES_URL"),
        (["relay", "shards", "--state", "nowhere"], "not nowhere"),
        (["relay", "resume", "1"], "WAYBILL_POSTGRES_URL"),
        (["relay", "rewind", "1", "2"], "WAYBILL_POSTGRES_URL"),
    ],
)
def test_without_a_store_to_ask_it_is_said_how_to_name_one(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, arguments: list[str], what: str
) -> None:
    monkeypatch.delenv("WAYBILL_POSTGRES_URL", raising=False)
    done = runner.invoke(app, arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert what in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["dead", "retry"],
        ["dead", "retry", "1", "--all"],
        ["dead", "retry", "1", "--shard", "3"],
        ["dead", "retry", "x"],
        ["dead", "discard", "1"],
        ["dead", "discard", "--reason", "x"],
        ["dead", "list", "--shard", "64"],
        ["dead", "list", "--limit", "501"],
        ["relay", "rewind", "64", "1"],
        ["relay", "rewind", "1"],
        ["relay", "rewind", "1", "0"],
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(runner: CliRunner, arguments: list[str]) -> None:
    done = runner.invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
