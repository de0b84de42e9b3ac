from __future__ import annotations

import random
import socket
from contextlib import closing

import pytest

from deploy.local.ports import FREE, FREE_VARIABLE, HOST, free_port


def test_a_free_port_is_one_of_those_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FREE_VARIABLE, "31990-31999")
    assert {free_port() for _ in range(50)} <= set(range(31990, 32000))


def test_without_that_it_is_below_those_of_outgoing_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FREE_VARIABLE)
    assert free_port() in FREE


def test_it_is_neither_taken_nor_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.socket()) as other:
        other.bind((HOST, free_port()))
        other.listen()
        used = other.getsockname()[1]
        monkeypatch.setenv(FREE_VARIABLE, f"{used}-{used}")
        with pytest.raises(OSError, match="no free port"):
            free_port()
    assert free_port() == used
    with pytest.raises(OSError, match="no free port"):
        free_port({used})


def test_runs_that_seed_chance_alike_do_not_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FREE_VARIABLE)
    found = set()
    for _ in range(5):
        random.seed(7)
        found.add(free_port())
    assert len(found) > 1


def test_an_empty_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FREE_VARIABLE, "2-1")
    with pytest.raises(ValueError, match=FREE_VARIABLE):
        free_port()
