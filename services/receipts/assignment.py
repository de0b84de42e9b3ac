"""Which partitions the group gave to this process, and which offset comes next in each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokafka import ConsumerRebalanceListener

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiokafka import TopicPartition


class Assignment(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """Kafka's word on who reads what, taken as a hint: the stored offsets decide who may apply.

    ``placed`` is true once every assigned partition stands at its stored offset. What is read before that, between
    Kafka's assignment and our own placing, may come from any offset and must be dropped.
    """

    def __init__(self) -> None:
        self.partitions: frozenset[int] | None = None
        self.next: dict[int, int] = {}
        self.generation = 0
        self.placed = False
        self.cluster = ""

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:  # noqa: ARG002 - aiokafka's interface
        """A rebalance begins: whatever is under way was read for an assignment that ends."""
        self.partitions = None
        self.lose()

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """A rebalance has ended."""
        self.partitions = frozenset(tp.partition for tp in assigned)
        self.lose()

    def lose(self) -> None:
        """The positions are not to be trusted any more: read the stored ones again."""
        self.generation += 1
        self.placed = False
        self.next = {}

    def place(self, cluster: str, positions: Mapping[int, int]) -> None:
        """Every partition stands at its stored offset."""
        self.cluster = cluster
        self.next = dict(positions)
        self.placed = True
