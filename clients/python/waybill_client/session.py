"""The client's side of the protocol, without sockets, clock or chance of its own.

Frames go in as parsed objects, with the time; what is to be done comes out as a list of outputs, in the order in which
to do it. Times are seconds of any one monotonic clock. What each frame means is in ``receiving``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._frames import encode
from .acks import Acks
from .errors import BadFrame, Conflict
from .greeting import cursors
from .outbox import Key, Outbox
from .outputs import Changed, Disagrees, Failed, Output, Rewound, Write
from .receiving import HANDLERS
from .standing import Standing
from .stats import Stats
from .timeline import Receipts, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ._frames import UnreadTotals
    from .store import Outgoing, Saved

PULL_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a session behaves.

    ``sync`` is ``full`` or ``live``. Acks wait for ``ack_delay_s`` seconds or ``ack_events`` events, whichever comes
    first. A request without an answer for ``answer_timeout_s`` seconds is asked again.
    """

    client: str = "waybill-client"
    sync: str = "full"
    auto_ack: bool = True
    ack_delay_s: float = 0.1
    ack_events: int = 50
    answer_timeout_s: float = 15.0
    pull_limit: int = 200


class Session:
    """The state of one device over all its connections."""

    def __init__(
        self, device_id: str, settings: Settings, *, random: Callable[[], float], stats: Stats | None = None
    ) -> None:
        self.device_id = device_id
        self.settings = settings
        self.stats = stats if stats is not None else Stats()
        self.timelines: dict[str, Timeline] = {}
        self.receipts = Receipts()
        self.outbox = Outbox(random, settings.answer_timeout_s, self.stats)
        self.acks = Acks(settings.ack_delay_s, settings.ack_events)
        self.standing = Standing(random)
        self.pulls: dict[str, tuple[str, float]] = {}
        self.pull_again: dict[str, float] = {}
        self.user_id: str | None = None
        self.window = 256
        self.since: str | None = None
        self.listed = False
        self.totals: UnreadTotals | None = None
        self.misread = False
        self._number = 0
        self._healing: set[str] = set()
        self._pull_number = 0

    def restore(self, saved: Iterable[Saved], outgoing: Iterable[Outgoing], now: float) -> None:
        """Take over what an earlier process of this device left in its store."""
        for one in saved:
            timeline = self.timelines[one.conversation_id] = Timeline(one.conversation_id)
            timeline.known = True
            timeline.cursor = timeline.head = one.last_pulled_seq
            timeline.mark = (one.read_version, one.read_seq)
            if one.acked_seq < one.last_pulled_seq and not self.settings.auto_ack:
                timeline.unacked.add(one.acked_seq + 1, one.last_pulled_seq)
            if one.event_id is not None:
                timeline.ids[one.last_pulled_seq] = one.event_id
        for message in outgoing:
            if message.seq is not None and message.event_id is not None:
                self.timeline(message.conversation_id).promise(message.seq, message.event_id)
            else:
                self.outbox.add(message.key, message.fields(), now, strict=message.strict)

    def hello(self, token: str) -> dict[str, Any]:
        """Return the frame that begins a connection; what was under way on the last one is over."""
        self.disconnected()
        self._number += 1
        named, since = cursors(self.timelines.values(), self.since)
        frame: dict[str, Any] = {
            "t": "hello",
            "token": token,
            "device_id": self.device_id,
            "client": self.settings.client,
            "sync": self.settings.sync,
        }
        # In `live` a first session begins at the heads; in `full` an empty store has to say that it is empty.
        if named or self.settings.sync == "full":
            frame["cursors"] = named
        if since is not None:
            frame["since"] = since
        return frame

    def disconnected(self) -> None:
        """The connection is gone: requests wait for the next one, and the server starts again from the cursors."""
        self.listed = self.misread = False
        self.outbox.disconnected()
        self.pulls.clear()
        self.pull_again.clear()
        for timeline in self.timelines.values():
            timeline.pulling = False
            timeline.pull_to = 0
            timeline.ahead.clear()

    def receive(self, frame: Mapping[str, Any], now: float) -> list[Output]:
        """Take one frame. One that can't be read changes nothing and is counted."""
        kind = frame.get("t")
        handler = HANDLERS.get(kind) if isinstance(kind, str) else None
        if handler is None:
            self.stats.unknown_frames += 1
            return []
        try:
            return handler(self, frame, now)
        except BadFrame:
            self.stats.bad_frames += 1
            self.misread = self.misread or kind == "conversation"
            return []

    def request(self, key: Key, fields: bytes, now: float, *, strict: bool = False) -> list[Output]:
        """Begin a request that ``outbox.check`` let pass; ``strict`` waits for the earlier ones of its conversation."""
        return [Write(data) for data in self.outbox.add(key, fields, now, strict=strict)]

    def watch(self, conversation_id: str, *, on: bool) -> list[Output]:
        """Want other members' receipts of a group, or no more; said again on each connection."""
        return self._say(self.standing.watch(conversation_id, on=on))

    def presence(self, users: Sequence[str]) -> list[Output]:
        """Want the online state of these, and of nobody else; said again on each connection."""
        return self._say(self.standing.presence(users))

    def typing(self, conversation_id: str, now: float) -> list[Output]:
        """The user is writing. It is worth nothing later, so without a connection it is dropped."""
        data = self.standing.typing(conversation_id, now) if self.listed else None
        return [] if data is None else [Write(data)]

    def _say(self, data: bytes) -> list[Output]:
        # Before the listing is complete the server may not know the conversation; `listed` says all of it.
        return [Write(data)] if self.listed else []

    def stored(self, conversation_id: str, seqs: Collection[int], now: float) -> list[Output]:
        """Events are in the store: they may be acked, unless the app does that itself."""
        timeline = self.timelines.get(conversation_id)
        if timeline is None or not self.settings.auto_ack:
            return []
        for seq in seqs:
            timeline.stored(seq)
        self.acks.released(timeline, len(seqs), now)
        return self.acks_if_due(now)

    def ack(self, conversation_id: str, ranges: Iterable[tuple[int, int]], now: float) -> list[Output]:
        """The app's own ack. What this device has not taken is left out."""
        timeline = self.timelines.get(conversation_id)
        if timeline is None:
            return []
        for low, high in ranges:
            timeline.ack(low, high)
        self.acks.released(timeline, 1, now)
        return [*self.acks_if_due(now), Changed(conversation_id)]

    def read(self, conversation_id: str, seq: int) -> list[Output]:
        """Raise the own read mark to ``seq``; nothing happens if it is there already."""
        timeline = self.timelines.get(conversation_id)
        if timeline is None or seq <= timeline.mark[1]:
            return []
        version = timeline.mark[0]
        timeline.mark = (version, seq)
        return [*self.mark_frame(timeline, version), Changed(conversation_id)]

    def unread(self, conversation_id: str, seq: int) -> list[Output]:
        """Set the own read mark to ``seq`` on purpose, with a version one above."""
        timeline = self.timelines.get(conversation_id)
        if timeline is None:
            return []
        told = timeline.mark[0]
        timeline.mark = (told + 1, seq)
        return [*self.mark_frame(timeline, told), Changed(conversation_id)]

    def rewind(self, conversation_id: str, seq: int) -> list[Output]:
        """Forget what is above ``seq``: the server has less, or something else."""
        self._healing.discard(conversation_id)
        timeline = self.timelines.get(conversation_id)
        if timeline is None:
            return []
        timeline.rewind(seq)
        # A page that is under way follows the old cursor; taken now, it would leave a hole.
        self.pulls = {rid: pull for rid, pull in self.pulls.items() if pull[0] != conversation_id}
        self.pull_again.pop(conversation_id, None)
        self.receipts.forget(conversation_id)
        self.stats.rewinds += 1
        outputs: list[Output] = [Rewound(conversation_id, seq), Changed(conversation_id)]
        # A seq above now belongs to another event, or will: what was aimed at it must not hit that.
        for key in self.outbox.aimed_above(conversation_id, seq):
            self.outbox.answered(key)
            self.stats.refused += 1
            outputs.append(Failed(key, Conflict("its target was lost by the server", field="target_seq")))
        return outputs

    def heal_failed(self, conversation_id: str) -> None:
        """The shell could not find where both sides agree; the next sign of it asks again."""
        self._healing.discard(conversation_id)

    def tick(self, now: float) -> list[Output]:
        """Return what time alone has made due."""
        outputs: list[Output] = [Write(data) for data in self.outbox.due(now)]
        outputs += self.acks_if_due(now)
        for rid in [one for one, (_, until) in self.pulls.items() if until <= now]:
            conversation_id, _ = self.pulls.pop(rid)
            self.pull_later(self.timelines[conversation_id], now - PULL_RETRY_S)
        for conversation_id in [one for one, at in self.pull_again.items() if at <= now]:
            del self.pull_again[conversation_id]
            outputs += self.pull(self.timelines[conversation_id], now)
        if self.standing.due(now) and self.listed:
            outputs += [Write(data) for data in self.standing.frames()]
            for timeline in self.timelines.values():
                if timeline.told < timeline.mark:
                    outputs += self.mark_frame(timeline, timeline.told[0])
        return outputs

    def next_at(self) -> float | None:
        """Return when to call ``tick`` next, None if time alone changes nothing."""
        if not self.outbox.online:
            return None
        times = [self.outbox.next_at(), self.acks.due_at(), self.standing.again_at]
        if self.pulls or self.pull_again:
            times += [*self.pull_again.values(), *(until for _, until in self.pulls.values())]
        return min((at for at in times if at is not None), default=None)

    def flush_acks(self) -> list[Output]:
        """Return the acks of everything released so far."""
        return [Write(data) for data in self.acks.flush()] if self.outbox.online else []

    # What `receiving` needs.

    def timeline(self, conversation_id: str) -> Timeline:
        """Return a conversation's timeline, a new one if nothing is known of it."""
        timeline = self.timelines.get(conversation_id)
        if timeline is None:
            timeline = self.timelines[conversation_id] = Timeline(conversation_id)
        return timeline

    def first_frame(self, timeline: Timeline) -> bool:
        """Tell, once per connection and conversation, that this is its first ``conversation`` frame."""
        first = timeline.listed_in != self._number
        timeline.listed_in = self._number
        return first

    def acks_if_due(self, now: float) -> list[Output]:
        """Return the acks if they have waited long enough, or are many."""
        due = self.acks.due_at()
        return self.flush_acks() if due is not None and due <= now else []

    def disagrees(self, conversation_id: str) -> list[Output]:
        """Ask the shell to heal a conversation, once at a time."""
        if conversation_id in self._healing:
            return []
        self._healing.add(conversation_id)
        return [Disagrees(conversation_id)]

    def pull(self, timeline: Timeline, now: float) -> list[Output]:
        """Pull what follows the cursor, unless that is under way."""
        if timeline.pulling or timeline.conversation_id in self.pull_again or not self.outbox.online:
            return []
        timeline.pulling = True
        timeline.pulled_after = timeline.cursor
        self._pull_number += 1
        rid = f"p{self._pull_number}"
        self.pulls[rid] = (timeline.conversation_id, now + self.settings.answer_timeout_s)
        pull = {"t": "pull", "rid": rid, "conversation_id": timeline.conversation_id, "after": timeline.cursor}
        return [Write(encode({**pull, "limit": self.settings.pull_limit}))]

    def pull_later(self, timeline: Timeline, now: float) -> None:
        """Pull again after a while."""
        timeline.pulling = False
        self.pull_again[timeline.conversation_id] = now + PULL_RETRY_S

    def mark_frame(self, timeline: Timeline, told: int) -> list[Output]:
        """Return the frame that proposes the own read mark to a server whose version is ``told``."""
        if not self.outbox.online:
            return []
        version, seq = timeline.mark
        frame = {"t": "unread" if version > told else "read", "conversation_id": timeline.conversation_id}
        return [Write(encode({**frame, "seq": seq, "version": version}))]
