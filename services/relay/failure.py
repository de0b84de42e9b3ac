"""Which failures pass by themselves. Pure."""

from __future__ import annotations

from aiokafka import errors

_PERMANENT: tuple[type[BaseException], ...] = (
    errors.MessageSizeTooLargeError,
    errors.RecordTooLargeError,
    errors.RecordListTooLargeError,
    errors.InvalidTopicError,
    errors.UnknownTopicOrPartitionError,
    errors.TopicAuthorizationFailedError,
    errors.InvalidTimestampError,
    errors.PolicyViolationError,
    errors.UnsupportedForMessageFormatError,
    errors.InvalidRequiredAcksError,
)
"""What the same record would meet again. Everything else passes or concerns all records alike (a broker that is away,
a leader that moves, too few replicas, an expired login), so that waiting is right and no record is to blame."""


def is_permanent(error: BaseException) -> bool:
    """Whether sending the same record again can't help."""
    return isinstance(error, _PERMANENT)
