import pytest
from aiokafka import errors

from services.relay.failure import is_permanent


@pytest.mark.parametrize(
    "error",
    [
        errors.MessageSizeTooLargeError(),
        errors.RecordListTooLargeError(),
        errors.InvalidTopicError(),
        errors.for_code(87)(),
        errors.TopicAuthorizationFailedError("t"),
    ],
)
def test_what_the_same_record_would_meet_again(error: Exception) -> None:
    assert is_permanent(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.KafkaConnectionError(),
        errors.UnknownTopicOrPartitionError(),
        errors.NotLeaderForPartitionError(),
        errors.LeaderNotAvailableError(),
        errors.NotEnoughReplicasError(),
        errors.NotEnoughReplicasAfterAppendError(),
        errors.RequestTimedOutError(),
        errors.OutOfOrderSequenceNumber(),
        errors.UnknownProducerId(),
        errors.ProducerFenced(),
        errors.ProducerClosed(),
        errors.SaslAuthenticationFailed(),
        errors.KafkaStorageError(),
        errors.UnknownError(),
        TimeoutError(),
        OSError(),
    ],
)
def test_what_passes_or_is_no_records_fault(error: Exception) -> None:
    assert not is_permanent(error)
