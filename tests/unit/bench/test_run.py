import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import run, stage
from bench.e2e import Settings as E2eSettings
from bench.gateway import Settings as GatewaySettings
from bench.receipts import Settings as ReceiptsSettings
from bench.relay import Settings as RelaySettings
from deploy.local.endpoints import Endpoints
from tests.unit.bench.results_of import of

ENDPOINTS = Endpoints(
    gateway="http://g",
    ingest="http://i",
    console="http://c",
    private={},
    postgres="",
    kafka="",
    redis="",
    auth_secret="s",
    pids={},
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Nothing is started; the settings that a benchmark was given."""
    given: list[object] = []

    @contextlib.contextmanager
    def waybill(file: Path | None, *, pool: int) -> Iterator[Endpoints]:
        yield ENDPOINTS

    async def measure(where: Endpoints, settings: object) -> dict[str, object]:
        given.append(settings)
        return {key: value for key, value in of("e2e").items() if key not in ("machine", "date", "command")}

    monkeypatch.setattr(stage, "waybill", waybill)
    monkeypatch.setattr(run.e2e, "measure", measure)
    return given


@pytest.mark.promise("protocol.8.bench")
def test_json_ends_with_one_line_of_the_protocols_names(
    measured: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["e2e", "--json", "--rounds", "1", "--seconds", "2.5", "--rate", "50"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"name", "waybill", "peer", "ratio", "machine", "date"} <= result.keys()
    assert result["command"] == "waybill bench e2e --json --rounds 1 --seconds 2.5 --rate 50"
    assert measured == [E2eSettings(rounds=1, measure_s=2.5, rate_s=50)]


def test_without_json_people_get_a_table(measured: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["e2e"]) == 0
    assert "waybill bench e2e" in capsys.readouterr().out


def test_a_result_is_kept_only_when_asked_for(
    measured: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(run.results, "keep", lambda result: kept.append(result["name"]))
    monkeypatch.setattr(run.report, "write", lambda: kept.append("page"))
    assert run.main(["e2e", "--json"]) == 0
    assert kept == []
    assert run.main(["e2e", "--json", "--keep"]) == 0
    assert kept == ["e2e", "page"]


@pytest.mark.parametrize("error", [RuntimeError("refused"), ExceptionGroup("several", [RuntimeError("refused")])])
def test_a_failure_is_a_line_on_standard_error(
    error: Exception, measured: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(where: Endpoints, settings: object) -> dict[str, object]:
        raise error

    monkeypatch.setattr(run.e2e, "measure", measure)
    assert run.main(["e2e", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "waybill bench: refused\n"


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Nothing is started; the settings that the benchmark of relays was given."""
    given: list[object] = []

    @contextlib.contextmanager
    def stack(state: Path) -> Iterator[None]:
        yield None

    async def measure(stack: None, folder: Path, settings: object) -> dict[str, object]:
        given.append(settings)
        return {key: value for key, value in of("relay").items() if key not in ("machine", "date", "command")}

    monkeypatch.setattr(run, "Stack", stack)
    monkeypatch.setattr(run.relay, "measure", measure)
    return given


@pytest.mark.promise("protocol.8.bench")
def test_relays_are_measured_with_the_settings_asked_for(
    relays: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["relay", "--json"]) == 0
    arguments = ["--rounds", "1", "--seconds", "5", "--backlog", "5000", "--deep", "9000", "--peer", "p", "--alone"]
    assert run.main(["relay", *arguments]) == 0
    asked = RelaySettings(peer=Path("p"), alone=True, rounds=1, seconds=5, backlog=5_000, deep=9_000)
    assert relays == [RelaySettings(), asked]
    first, *table = capsys.readouterr().out.splitlines()
    result = json.loads(first)
    assert {"name", "waybill", "peer", "ratio", "machine", "date"} <= result.keys()
    assert "waybill bench relay" in "".join(table)


@pytest.mark.promise("protocol.8.bench")
def test_receipts_are_measured_with_the_settings_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[object] = []

    @contextlib.contextmanager
    def stack(state: Path) -> Iterator[None]:
        yield None

    async def measure(stack: None, folder: Path, settings: object) -> dict[str, object]:
        given.append(settings)
        return {key: value for key, value in of("receipts").items() if key not in ("machine", "date", "command")}

    monkeypatch.setattr(run, "Stack", stack)
    monkeypatch.setattr(run.receipts, "measure", measure)
    assert run.main(["receipts", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"name", "waybill", "peer", "ratio", "machine", "date"} <= result.keys()
    arguments = ["--parts", "growth,rate", "--mixes", "wide", "--acks", "5000", "--messages", "1000", "--alone"]
    arguments += ["--rounds", "1", "--seconds", "5", "--rate", "100", "--profile", "p"]
    assert run.main(["receipts", *arguments]) == 0
    assert given == [
        ReceiptsSettings(),
        ReceiptsSettings(
            alone=True,
            rounds=1,
            seconds=5,
            acks=5_000,
            rate=100,
            messages=1_000,
            parts=("rate", "growth"),
            mixes=("wide",),
            profile=Path("p"),
        ),
    ]
    assert "waybill bench receipts" in capsys.readouterr().out


@pytest.fixture
def gateways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """Nothing is started: the settings that the benchmark of gateways was given, what is told, what was kept."""
    case: dict[str, object] = {"settings": [], "errors": {}, "kept": [], "missing": ""}

    @contextlib.contextmanager
    def stack(state: Path) -> Iterator[None]:
        yield None

    async def measure(stack: None, folder: Path, settings: object) -> dict[str, object]:
        case["settings"] = settings
        told = {key: value for key, value in of("gateway").items() if key not in ("machine", "date", "command")}
        return {**told, "errors": case["errors"]}

    monkeypatch.setattr(run, "Stack", stack)

    async def build(folder: Path, settings: object) -> None:
        if case["missing"]:
            raise FileNotFoundError(case["missing"])

    monkeypatch.setattr(run.gateway, "build", build)
    monkeypatch.setattr(run.gateway, "measure", measure)
    monkeypatch.setattr(run.results, "keep", lambda result: case.update(kept=result["name"]))
    monkeypatch.setattr(run.report, "write", lambda: None)
    return case


@pytest.mark.promise("protocol.8.bench")
def test_gateways_are_measured_with_the_settings_asked_for(
    gateways: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["gateway", "--json"]) == 0
    assert gateways["settings"] == GatewaySettings()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"name", "waybill", "peer", "ratio", "machine", "date"} <= result.keys()
    arguments = ["--cells", "c,a", "--alone", "--seconds", "8", "--rounds", "1", "--scale", "0.5", "--profile", "p"]
    assert run.main(["gateway", *arguments, "--peer", "f"]) == 0
    assert gateways["settings"] == GatewaySettings(
        peer=Path("f"), alone=True, rounds=1, seconds=8, cells=("a", "c"), scale=0.5, profile=Path("p")
    )
    assert "waybill bench gateway" in capsys.readouterr().out


def test_a_result_with_errors_is_told_but_fails_and_is_not_kept(
    gateways: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    gateways["errors"] = {"waybill": {"a": {"gaps": 3}}}
    assert run.main(["gateway", "--json", "--keep"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["errors"] == gateways["errors"]
    assert said.err.splitlines()[-1] == "waybill bench: ERRORS: waybill, a: 3 gaps"
    assert gateways["kept"] == []
    gateways["errors"] = {}
    assert run.main(["gateway", "--json", "--keep"]) == 0
    assert gateways["kept"] == "gateway"


def test_without_the_load_client_nothing_is_started(
    gateways: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    gateways["missing"] = "Go is not installed"
    assert run.main(["gateway", "--alone", "--json"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "waybill bench: Go is not installed\n")
    assert gateways["settings"] == []


def test_too_few_files_are_said_before_anything_is_started(
    gateways: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "raise_file_limit", lambda: 4_096)
    assert run.main(["gateway"]) == 1
    assert "10300 open files, and 4096 are allowed" in capsys.readouterr().err
    assert run.main(["gateway", "--cells", "a,b"]) == 0


def test_a_termination_ends_the_block_as_an_interrupt_does() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), run._interrupted_by_termination():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_endpoints_that_are_not_there_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["send", "--endpoints", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["send", "--pool", "4"],
        ["send", "--rounds", "0"],
        ["e2e", "--seconds", "-1"],
        ["e2e", "--rate", "0"],
        ["relay", "--backlog", "1"],
        ["relay", "--deep", "-1"],
        ["gateway", "--cells", "f"],
        ["receipts", "--parts", "rate,other"],
        ["receipts", "--mixes", ""],
        ["gateway", "--scale", "2"],
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert "usage: waybill bench" in capsys.readouterr().err
