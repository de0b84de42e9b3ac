from __future__ import annotations

import asyncio
import os
import signal

import pytest

from deploy.local.interrupts import Interrupts
from tests.waiting import until


def test_outside_a_loop_a_signal_is_an_exception() -> None:
    with Interrupts().handled():
        for number in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts().handled():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_a_loop_the_first_asks_and_the_second_hurries_and_after_it_they_are_exceptions_again() -> None:
    interrupts = Interrupts()

    async def life() -> None:
        stop, hurry = asyncio.Event(), asyncio.Event()
        with interrupts.in_loop(stop, hurry):
            os.kill(os.getpid(), signal.SIGTERM)
            await until(stop.is_set, timeout=5, what="stop")
            assert not hurry.is_set()
            os.kill(os.getpid(), signal.SIGINT)
            await until(hurry.is_set, timeout=5, what="hurry")

    with interrupts.handled():
        asyncio.run(life())
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
