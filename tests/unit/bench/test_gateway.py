import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from bench import centrifugo, gateway, gateway_services, processes, shadow
from bench.gateway import Settings

CONVERSATION = "11111111-1111-4111-8111-111111111111"
EVENT = "01890000-0000-7000-8000-000000000001"


class Fake:
    """Measures nothing; what it was asked for in order."""

    def __init__(self, *, alone: bool = False, gaps: int = 0) -> None:
        self.asked: list[str] = []
        self._alone = alone
        self._gaps = gaps

    def sides(self, name: str) -> tuple[str, ...]:
        return ("waybill",) if self._alone or name not in "abcde" else ("waybill", "peer")

    async def waybill(self, name: str, cell: object, label: str) -> None:
        self.asked.append(label)

    async def turn(self, side: str, name: str, label: str) -> gateway._Turn:
        self.asked.append(f"{side} {label}")
        cpu = {"waybill": 8.0, "peer": 12.0}[side] + len(self.asked)
        errors = {"gaps": self._gaps} if self._gaps and side == "waybill" else {}
        return gateway._Turn({f"{name}_cpu_us": cpu}, {f"{name}_p50_ms": 1.0}, errors)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_SETTLE_S", 0.0)


def rounds(fake: Any, **settings: Any) -> dict[str, Any]:
    return asyncio.run(gateway._rounds(fake, Settings(**settings)))


def test_sides_take_turns_in_every_cell_after_a_warm_up() -> None:
    fake = Fake()
    found = rounds(fake, rounds=2, cells=("a", "send"))
    turns = [f"{of}-{number}" for number in (1, 2) for of in ("waybill a", "peer a", "waybill send")]
    assert fake.asked == ["warm-up", *turns]
    assert found["waybill"] == {"a_cpu_us": 11.5, "send_cpu_us": 13.5}
    assert found["peer"] == {"a_cpu_us": 16.5}
    assert found["ratio"] == {"a_cpu_us": round(16.5 / 11.5, 2)}
    assert found["errors"] == {}
    assert found["turns"]["waybill"][0] == {
        "a_cpu_us": 10.0,
        "a_p50_ms": 1.0,
        "send_cpu_us": 12.0,
        "send_p50_ms": 1.0,
    }


def test_alone_there_is_no_ratio() -> None:
    found = rounds(Fake(alone=True), rounds=1, cells=("a",))
    assert found.keys() == {"waybill", "errors", "turns"}


def test_errors_of_every_round_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = rounds(Fake(gaps=2), rounds=2, cells=("a",))
    assert found["errors"] == {"waybill": {"a": {"gaps": 4}}}
    assert capsys.readouterr().err.count("ERRORS: waybill, a: 2 gaps") == 2


def test_who_is_measured() -> None:
    for alone, sides in ((False, ("waybill", "peer")), (True, ("waybill",))):
        bench = gateway._Bench(*(SimpleNamespace() for _ in range(4)), Settings(alone=alone))  # type: ignore[arg-type, call-arg]
        assert bench.sides("a") == sides
        assert bench.sides("send") == bench.sides("stalled") == ("waybill",)


def test_a_folder_without_the_load_client_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"load, centrifuge-server missing.*--peer"):
        asyncio.run(centrifugo.build(tmp_path, tmp_path, peer=True))


def source(folder: Path) -> Path:
    (folder / "load").mkdir()
    (folder / "load" / "main.go").write_text("package main\n")
    return folder


def test_without_go_the_bench_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="Go is not installed"):
        asyncio.run(centrifugo.build(source(tmp_path), tmp_path, peer=False))


def program(file: Path, text: str) -> Path:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_what_go_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "go", "echo 'no such module' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="no such module"):
        asyncio.run(centrifugo.build(source(tmp_path), tmp_path, peer=False))


TARGET = centrifugo.Target(["-proto", "waybill"], [11, 12], [13])


def test_the_load_client_is_told_of_the_gateway_and_its_answer_read(tmp_path: Path) -> None:
    program(tmp_path / "load", """echo "{\\"flags\\": \\"$*\\"}" """)
    programs = centrifugo.Programs(tmp_path, "k:1", "t", "s")
    answer = asyncio.run(programs.load("a-1", TARGET, ["-mode", "idle"]))
    where = "-brokers k:1 -topic t -secret s"
    assert answer == {"flags": f"{where} -server-pid 11,12 -broker-pid 13 -proto waybill -mode idle"}


def test_a_load_client_that_fails_says_why(tmp_path: Path) -> None:
    program(tmp_path / "load", "echo 'load: 3 of 5 ready' >&2; exit 1")
    programs = centrifugo.Programs(tmp_path, "k:1", "t", "s")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^a-1: load: 3 of 5 ready$"):
            asyncio.run(programs.load("a-1", TARGET, []))


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_peer_is_there_from_ready_on_and_ended_at_the_end(tmp_path: Path) -> None:
    program(tmp_path / "centrifuge-server", 'echo "$*" >&2; echo ready; exec sleep 60')
    programs = centrifugo.Programs(tmp_path, "k:1", "t", "s")

    async def run() -> centrifugo.Target:
        async with programs.peer([13]) as target:
            assert runs(target.server[0])
            return target

    target = asyncio.run(run())
    assert not runs(target.server[0])
    assert target.known == [13]
    assert target.flags[:2] == ["-proto", "centrifugo"]
    assert "-listen 127.0.0.1:" in (tmp_path / "centrifuge-server.log").read_text()


def test_a_peer_that_does_not_start_says_why(tmp_path: Path) -> None:
    program(tmp_path / "centrifuge-server", "echo 'no broker' >&2; exit 1")

    async def run() -> None:
        async with centrifugo.Programs(tmp_path, "k:1", "t", "s").peer([]):
            pass

    with pytest.raises(RuntimeError, match="no broker"):
        asyncio.run(run())


def test_the_gateways_settings_alone_may_be_given_from_outside() -> None:
    environment = {"WAYBILL_GATEWAY_PROCESSES": "2", "WAYBILL_POSTGRES_URL": "postgres://x", "PATH": "/bin"}
    assert gateway_services.given(environment) == {"WAYBILL_GATEWAY_PROCESSES": "2"}


def test_a_gateways_processes_are_all_below_its_first() -> None:
    text = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = processes.descendants(process.pid)
        process.communicate(b"\n")
    assert found[0] == process.pid
    assert len(found) == 2
    assert os.getpid() not in found


def record(source_: str, seq: int) -> Any:
    frame = {
        "t": "event",
        "conversation_id": CONVERSATION,
        "seq": seq,
        "event_id": EVENT,
        "type": "message",
        "sender_id": "u000001",
        "client_msg_id": f"m{seq}",
        "body": {"text": "hello", "ts": "1"},
        "created_at": "2026-01-01T00:00:00.000000Z",
    }
    return SimpleNamespace(
        value=json.dumps(frame, separators=(",", ":")).encode(), headers=[("ce_source", source_.encode())]
    )


def test_what_ingest_did_not_write_becomes_rows_as_it_is() -> None:
    found = shadow.rows([record("/waybill/ingest", 1), record("waybill", 2), record("waybill", 3)])
    assert found.conversations == [UUID(CONVERSATION)] * 2
    assert found.seqs == [2, 3]
    assert found.bodies == ['{"text":"hello","ts":"1"}'] * 2
    assert found.client_msg_ids == ["m2", "m3"]
