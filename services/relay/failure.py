"""Which failures pass by themselves. Pure."""

from __future__ import annotations

from typing import ClassVar

from aiokafka import errors


class FailedBatchError(Exception):
    """Kafka did not confirm a batch, for a reason that passes; its client is of no more use."""


class RefusedError(Exception):
    """Kafka refused a batch for good."""


class InvalidRecordError(errors.BrokerResponseError):  # type: ignore[misc]  # it has no types
    """The broker's own check of a record failed. The pinned aiokafka does not know this answer."""

    errno: ClassVar[int] = 87
    message: ClassVar[str] = "INVALID_RECORD"
    description: ClassVar[str] = "The record has failed the validation on the broker."


errors.kafka_errors.setdefault(InvalidRecordError.errno, InvalidRecordError)

_PERMANENT: tuple[type[BaseException], ...] = (
    errors.MessageSizeTooLargeError,
    errors.RecordTooLargeError,
    errors.RecordListTooLargeError,
    errors.InvalidTopicError,
    errors.TopicAuthorizationFailedError,
    errors.InvalidTimestampError,
    errors.PolicyViolationError,
    errors.UnsupportedForMessageFormatError,
    errors.InvalidRequiredAcksError,
    InvalidRecordError,
)
"""What the same record would meet again. Everything else passes or concerns all records alike (a broker that is away,
a leader that moves, a topic that was deleted, too few replicas, an expired login), so that waiting is right and no
record is to blame."""


def is_permanent(error: BaseException) -> bool:
    """Whether sending the same record again can't help."""
    return isinstance(error, _PERMANENT)
