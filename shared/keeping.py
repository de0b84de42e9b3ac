"""How long topics keep what is in them: never longer than what was erased may be found anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import UnknownTopicOrPartitionError, for_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ERASE_WITHIN_S = 604_800
"""The default of `WAYBILL_ERASE_WITHIN_S`: 7 days."""

_FILES_GO_MS = 60_000
_OF_THE_TOPIC = 1
"""What DescribeConfigs says of a value that was set on the topic itself."""


class Admin(Protocol):
    """The admin client, as far as it is needed here."""

    async def describe_configs(self, config_resources: list[ConfigResource]) -> Sequence[Described]:
        """Answers of the brokers."""
        ...

    async def alter_configs(self, config_resources: list[ConfigResource]) -> Sequence[Described]:
        """Answers of the brokers."""
        ...


class Described(Protocol):
    """An answer."""

    resources: Sequence[tuple[object, ...]]


def keeping(erase_within_s: float) -> dict[str, str]:
    """The settings of a topic whose records are gone after ``erase_within_s``.

    Kafka forgets whole segments, once the newest record of one is too old: a record lives for at most both times. An
    eighth is left for the broker, which looks every few minutes, and for what is published late.
    """
    whole_ms = round(erase_within_s * 1000)
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(whole_ms * 6 // 8),
        "segment.ms": str(max(whole_ms // 8, 1)),
        "file.delete.delay.ms": str(min(_FILES_GO_MS, whole_ms // 16)),
    }


def kept_s(configs: Mapping[str, str]) -> float:
    """For how long a topic with these settings keeps a record at most, in seconds. Pure."""
    retention = int(configs["retention.ms"])
    if "delete" not in configs["cleanup.policy"] or retention < 0:
        return float("inf")
    return (retention + int(configs["segment.ms"]) + int(configs["file.delete.delay.ms"])) / 1000


async def configs_of(admin: Admin, topics: Iterable[str]) -> dict[str, dict[str, tuple[str, bool]]]:
    """All settings of these topics: each with whether it was set on the topic itself. Raises `KafkaError`.

    A topic that was made just now may not be known to the broker that is asked: it is left out.
    """
    asked = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
    found: dict[str, dict[str, tuple[str, bool]]] = {}
    for answer in await admin.describe_configs(asked):
        for code, message, _, name, entries in answer.resources:
            if code == UnknownTopicOrPartitionError.errno:
                continue
            _check(code, message)
            found[str(name)] = {entry[0]: (entry[1], entry[3] == _OF_THE_TOPIC) for entry in entries}  # type: ignore[attr-defined]  # aiokafka has no types for its answers
    return found


async def kept_by(admin: Admin, topics: Iterable[str]) -> dict[str, float]:
    """For how long each of these topics keeps a record at most, in seconds. Raises `KafkaError`."""
    found = await configs_of(admin, topics)
    return {topic: kept_s({name: value for name, (value, _) in configs.items()}) for topic, configs in found.items()}


async def shorten(admin: Admin, topics: Iterable[str], erase_within_s: float) -> list[str]:
    """Have topics that keep records for longer keep them for that long; their names. Raises `KafkaError`."""
    changes = []
    for topic, configs in (await configs_of(admin, topics)).items():
        if kept_s({name: value for name, (value, _) in configs.items()}) > erase_within_s:
            # What is not named would fall back to the broker's default.
            own = {name: value for name, (value, is_own) in configs.items() if is_own}
            changes.append(ConfigResource(ConfigResourceType.TOPIC, topic, configs=own | keeping(erase_within_s)))
    if changes:
        for answer in await admin.alter_configs(changes):
            for code, message, *_ in answer.resources:
                _check(code, message)
    return [change.name for change in changes]


def _check(code: object, message: object) -> None:
    if code:
        raise for_code(code)(message)
