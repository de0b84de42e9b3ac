"""Postgres, Kafka and Redis for tests, from one of three sources.

`environment`: addresses in `WAYBILL_TEST_POSTGRES_URL`, `WAYBILL_TEST_KAFKA` and `WAYBILL_TEST_REDIS_URL`.
`containers`: testcontainers, where a Docker engine answers; `WAYBILL_TEST_POSTGRES_IMAGE`, `WAYBILL_TEST_KAFKA_IMAGE`
and `WAYBILL_TEST_VALKEY_IMAGE` name the images. `embedded`: the stack of `deploy/local` in a temporary folder.

The first that is there is taken; an engine that does not start the images is passed over, and said so.
`WAYBILL_TEST_SOURCE` names one, which then has to work.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from deploy.local.lock import Records, StateInUseError, StateLock
from deploy.local.stack import Stack
from tests.containers import stores as containers

SOURCES = ("environment", "containers", "embedded")

ADDRESSES = ("WAYBILL_TEST_POSTGRES_URL", "WAYBILL_TEST_KAFKA", "WAYBILL_TEST_REDIS_URL")

FOLDER_PREFIX = "waybill-tests-"


@dataclass(frozen=True, slots=True)
class Stores:
    """Where the three servers are, and which of `SOURCES` they come from."""

    postgres_url: str
    """A superuser's address."""
    kafka: str
    """`host:port`."""
    redis_url: str
    source: str
    note: str = ""
    """Why it is not the source that one would expect."""


@contextmanager
def open_stores() -> Iterator[Stores]:
    """Start, or find, the servers, and stop what was started."""
    wanted = os.environ.get("WAYBILL_TEST_SOURCE")
    if wanted not in (None, *SOURCES):
        raise pytest.UsageError(f"WAYBILL_TEST_SOURCE is {wanted!r}; it may be {', '.join(SOURCES)}")
    with ExitStack() as stack:
        yield _enter(stack, wanted)


def _enter(stack: ExitStack, wanted: str | None) -> Stores:
    if wanted == "environment" or (wanted is None and any(name in os.environ for name in ADDRESSES)):
        return _from_environment()
    note = ""
    if wanted != "embedded" and containers.engine_answers():
        try:
            return Stores(*stack.enter_context(containers.started()), "containers")
        except Exception as error:
            if wanted == "containers":
                raise
            note = f"a Docker engine answers but did not start them: {error}"
    if wanted == "containers":
        raise pytest.UsageError("WAYBILL_TEST_SOURCE is 'containers', but no Docker engine answers")
    return replace(stack.enter_context(_embedded()), note=note)


def _from_environment() -> Stores:
    if missing := [name for name in ADDRESSES if not os.environ.get(name)]:
        raise pytest.UsageError(f"{', '.join(missing)} is not set; addresses need all of {', '.join(ADDRESSES)}")
    postgres_url, kafka, redis_url = (os.environ[name] for name in ADDRESSES)
    return Stores(postgres_url, kafka, redis_url, "environment")


@contextmanager
def _embedded() -> Iterator[Stores]:
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    # Postgres of a root's test run has another user, who must be able to reach its own folder below.
    folder.chmod(0o711)
    try:
        with Stack(folder) as stack:
            yield Stores(stack.postgres_url, stack.kafka, stack.redis, "embedded")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """End the servers of test runs that were killed, and remove their folders."""
    for folder in Path(tempfile.gettempdir()).glob(FOLDER_PREFIX + "*"):
        # In use by a run beside this one, or removed by it just now.
        with suppress(StateInUseError, FileNotFoundError):
            # Before its record is there, a folder is one that such a run has made and not locked yet.
            if folder.stat().st_uid == os.geteuid() and (folder / "children.json").exists():
                with StateLock(folder):
                    Records(folder).end_leftovers()
                    shutil.rmtree(folder, ignore_errors=True)
