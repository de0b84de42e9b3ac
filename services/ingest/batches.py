"""Which of the waiting sends go into the next transaction. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections import deque

PLAIN = frozenset(("message", "system"))
"""Types that change nothing of what the next event may do: any number of them may share a transaction."""

_LOOK_AHEAD = 4
"""How many times the size of a batch is looked at to fill it, so that one crowded conversation cannot make every cut
walk the whole queue."""


class Waiting(Protocol):
    """What `cut` needs to know of a send."""

    @property
    def conversation_id(self) -> str:
        """Its conversation."""
        ...

    @property
    def type(self) -> str:
        """An event type."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...


Item = TypeVar("Item", bound=Waiting)


def cut(queue: deque[Item], *, max_items: int, max_bytes: int) -> list[Item]:
    """Take the next batch out of a queue; what is left keeps its order.

    Within a conversation the order of arrival is kept, over batches too. A send that changes what others may do (a type
    not in `PLAIN`) is the only one of its conversation in its batch. At most ``max_items``, and ``max_bytes`` unless
    the first alone is larger. Never empty for a queue that is not.
    """
    batch: list[Item] = []
    passed_over: list[Item] = []
    closed: set[str] = set()
    begun: set[str] = set()
    room = max_bytes
    for _ in range(min(len(queue), max_items * _LOOK_AHEAD)):
        item = queue.popleft()
        conversation = item.conversation_id
        alone = item.type not in PLAIN
        if conversation in closed or (alone and conversation in begun):
            closed.add(conversation)
            passed_over.append(item)
            continue
        if batch and item.size > room:
            passed_over.append(item)
            break
        batch.append(item)
        room -= item.size
        begun.add(conversation)
        if alone:
            closed.add(conversation)
        if len(batch) == max_items:
            break
    queue.extendleft(reversed(passed_over))
    return batch
