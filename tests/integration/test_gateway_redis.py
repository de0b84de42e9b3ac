"""What gateways tell each other through Redis: presence, typing, kicks, revocations, rates. With and without Redis."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Protocol

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from shared import hints
from tests.pods import SHARED_RATE, Member, OwnValkey, Pod
from tests.told import Told
from tests.waiting import until


class Pods(Protocol):
    async def __call__(self, name: str, *, url: str = ..., **presence: float) -> Pod:
        """A pod that runs until the test ends, with a link that is up."""


@pytest.fixture
def prefix() -> str:
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
async def pods(redis_url: str, prefix: str) -> AsyncIterator[Pods]:
    async with AsyncExitStack() as stack:

        async def start(name: str, *, url: str = redis_url, **presence: float) -> Pod:
            pod = await stack.enter_async_context(Pod(url, prefix, name, **presence).running())
            await until(lambda: pod.link.available, timeout=5, what="link")
            return pod

        yield start


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, decode_responses=True) as made:
        yield made


@pytest.fixture(scope="module")
def started_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnValkey]:
    made = OwnValkey(tmp_path_factory.mktemp("valkey"))
    yield made
    made.kill()


async def told(session: Told, user_id: str, *online: bool | None, timeout: float = 5) -> None:
    """Wait until this was said of the user, and see that nothing else was."""
    await until(
        lambda: len(session.online(user_id)) >= len(online),
        timeout=timeout,
        what=f"{user_id} {online}, told {session.online(user_id)}",
    )
    assert session.online(user_id) == list(online)


async def quiet(pod: Pod) -> None:
    """Wait until Redis knows what the pod had to tell."""
    assert await pod.presence.drained(5)


async def test_a_watcher_hears_who_is_online_on_another_gateway(pods: Pods) -> None:
    here, there = await pods("here"), await pods("there")
    before = time.time()
    there.open("bob", "b1")
    await quiet(there)
    ann = here.open("ann", "a1")
    here.presence.watch(ann, ["bob", "cyd", "xeno", "ann"])
    await told(ann, "bob", True)
    await told(ann, "xeno", None)
    await told(ann, "ann", True)
    since = ann.states["bob"][1]
    assert since is not None
    assert time.strftime("%Y-%m-%dT%H:%M", time.gmtime(before)) <= since[:16]
    await until(lambda: ann.online("cyd")[-1:] == [False], timeout=5, what="cyd offline")
    there.open("cyd", "c1")
    await until(lambda: ann.online("cyd")[-1:] == [True], timeout=5, what="cyd online")
    there.open("xeno", "x1")
    there.presence.closed("b1")
    await told(ann, "bob", True, False)
    assert (ann.states["bob"][1] or "") > since
    assert ann.online("xeno") == [None], "they share no conversation"


async def test_a_reconnect_and_a_second_device_are_no_news(pods: Pods) -> None:
    here, there = await pods("here"), await pods("there")
    ann = here.open("ann", "a1")
    there.open("bob", "b1")
    await quiet(there)
    here.presence.watch(ann, ["bob"])
    await told(ann, "bob", True)
    since = ann.states["bob"]
    here.open("bob", "b2")
    await quiet(here)
    here.presence.closed("b2")
    there.presence.closed("b1")
    await quiet(there)
    here.open("bob", "b3")
    there.open("cyd", "c1")
    here.presence.watch(ann, ["bob", "cyd"])
    await until(lambda: ann.online("cyd")[-1:] == [True], timeout=5, what="cyd online")
    there.presence.closed("c1")
    await until(lambda: ann.online("cyd")[-1:] == [False], timeout=5, what="cyd offline")
    # Bob left before cyd did, so bob's time to come back was over earlier.
    await told(ann, "bob", True, True)
    assert ann.states["bob"] == since, "online since the first session"
    here.presence.closed("b3")
    await told(ann, "bob", True, True, False)


async def test_sessions_of_a_gateway_that_died_end_by_themselves(pods: Pods, redis_url: str, prefix: str) -> None:
    here = await pods("here", refresh_s=0.5)
    ann = here.open("ann", "a1")
    async with Pod(redis_url, prefix, "dying", refresh_s=0.5).running() as dying:
        await until(lambda: dying.link.available, timeout=5, what="link")
        dying.open("bob", "b1")
        await quiet(dying)
        here.presence.watch(ann, ["bob"])
        await told(ann, "bob", True)
    await told(ann, "bob", True, False, timeout=5)


async def test_what_redis_holds_is_bounded_in_time(pods: Pods, client: Redis, prefix: str) -> None:
    here = await pods("here")
    key = f"{prefix}:sessions:bob"
    await client.zadd(key, {"dead/x": time.time() - 1})
    here.open("bob", "b1")
    here.open("bob", "b2")
    await quiet(here)
    assert await client.zrange(key, 0, -1) == ["here/b1", "here/b2"]
    assert time.time() < await client.zscore(key, "here/b1") <= time.time() + 2.1
    for limited in (key, f"{prefix}:online:bob"):
        assert await client.ttl(limited) > 0
    here.presence.closed("b1")
    here.presence.closed("b2")
    await quiet(here)
    assert await client.exists(key) == 0
    assert await client.ttl(f"{prefix}:online:bob") > 3600, "last seen"


async def test_each_change_is_published_once_however_many_gateways_ask(pods: Pods, client: Redis, prefix: str) -> None:
    some = [await pods(f"pod{n}") for n in range(3)]
    heard: list[str] = []
    async with client.pubsub() as subscription:
        await subscription.subscribe(f"{prefix}:presence")
        watchers = [Told("ann", f"a{n}") for n in range(3)]
        for n, pod in enumerate(some):
            pod.presence.watch(watchers[n], ["bob"])
            pod.open("bob", f"b{n}")
        for ann in watchers:
            await until(lambda ann=ann: ann.online("bob")[-1:] == [True], timeout=5, what="online")
        for n, pod in enumerate(some):
            await quiet(pod)
            pod.presence.closed(f"b{n}")
        for ann in watchers:
            await until(lambda ann=ann: ann.online("bob")[-1:] == [False], timeout=5, what="offline")
        while message := await subscription.get_message(timeout=0.1):
            heard += [message["data"]] if message["type"] == "message" else []
    states = [part[0] for text in heard for part in text.split('["bob",')[1:]]
    assert states == ["1", "2", "0"], heard


async def test_while_postgres_is_away_all_is_unknown(pods: Pods) -> None:
    here = await pods("here")
    ann = here.open("ann", "a1")
    here.open("bob", "b1")
    await quiet(here)
    here.postgres_away = True
    here.presence.watch(ann, ["bob"])
    await told(ann, "bob", None)
    here.postgres_away = False
    await told(ann, "bob", None, True)


async def test_a_session_that_ended_is_told_nothing_more(pods: Pods) -> None:
    here = await pods("here")
    ann, bea = here.open("ann", "a1"), here.open("bea", "a2")
    for session in (ann, bea):
        here.presence.watch(session, ["bob"])
        await until(lambda session=session: session.online("bob"), timeout=5, what="answer")
    here.presence.closed("a1")
    count = len(ann.frames)
    here.open("bob", "b1")
    await until(lambda: bea.online("bob")[-1:] == [True], timeout=5, what="online")
    assert len(ann.frames) == count


@pytest.mark.promise("protocol.3.typing")
async def test_typing_reaches_other_gateways(pods: Pods) -> None:
    here, there = await pods("here"), await pods("there")
    ann, bob, cyd = Told("ann"), Told("bob"), Told("cyd")
    here.rooms["c"] = {ann: Member(), bob: Member()}
    there.rooms["c"] = {Told("ann"): Member(), cyd: Member()}
    here.typing.typed("a1", "ann", "c")
    frame = {"t": "typing", "conversation_id": "c", "user_id": "ann", "for_ms": 5000}
    await until(lambda: cyd.frames, timeout=5, what="typing")
    here.typing.typed("a2", "ann", "c")
    await until(lambda: len(cyd.frames) == 2, timeout=5, what="typing of the second session")
    assert [ann.frames, bob.frames, cyd.frames] == [[], [frame] * 2, [frame] * 2], "and none came back"
    assert not next(iter(there.rooms["c"])).frames


async def test_a_newer_session_is_told_to_the_others_alone(pods: Pods) -> None:
    here, there = await pods("here"), await pods("there")
    for number in range(1, 301):
        here.kicks.opened("ann", f"phone{number % 3}", number)
    await until(lambda: len(there.replaced) == 300, timeout=5, what="news")
    assert there.replaced == [("ann", f"phone{n % 3}", n) for n in range(1, 301)]
    assert here.replaced == []


async def test_a_revocation_is_heard_everywhere_and_what_is_none_is_not(pods: Pods, client: Redis, prefix: str) -> None:
    some = [await pods("here"), await pods("there")]
    hint = hints.Revocation(user_id="ann", device_id="phone", before=1_700_000_000.5)
    for channel in ("revocations", "presence", "sessions", "typing"):
        for message in (b"", b"{}", b"[1, 2]", b'["x", [["ann"]]]', b'["1", [["bob", 1, 2]]]', b"\xff"):
            await client.publish(f"{prefix}:{channel}", message)
    assert await hints.announce_revocation(client, prefix, hint) == 2
    for pod in some:
        await until(lambda pod=pod: pod.revoked, timeout=5, what="hint")
        assert pod.revoked == [hint]
        assert pod.link.available


async def test_a_user_is_limited_by_what_it_does_on_all_gateways(pods: Pods, client: Redis, prefix: str) -> None:
    here, there = await pods("here"), await pods("there")
    sessions = [here.limits.session("ann"), there.limits.session("ann"), there.limits.session("bob")]
    granted = [0, 0, 0]

    async def send(most: int) -> None:
        for _ in range(most):
            for n, session in enumerate(sessions[:2]):
                granted[n] += session.ask("sends", time.monotonic()).retry_after_ms == 0
            await asyncio.sleep(0.002)

    begun = time.monotonic()
    await send(100)
    await until(
        lambda: {session.ask("sends", time.monotonic()).scope for session in sessions[:2]} == {"shared"},
        timeout=5,
        what="both limited",
    )
    most = SHARED_RATE.burst + SHARED_RATE.per_s * (time.monotonic() - begun)
    assert sum(granted) < 2 * SHARED_RATE.burst, "each alone would have let through a burst"
    verdict = sessions[0].ask("sends", time.monotonic())
    assert 0 < verdict.retry_after_ms <= 1000 * (sum(granted) - most + 60) / SHARED_RATE.per_s + 1000
    assert sessions[2].ask("sends", time.monotonic()).retry_after_ms == 0, "another user"
    assert 0 < await client.pttl(f"{prefix}:rate:ann") < 60_000


@pytest.fixture
def valkey(started_valkey: OwnValkey) -> OwnValkey:
    return started_valkey


async def flush(valkey: OwnValkey) -> None:
    async with Redis.from_url(valkey.url) as client:
        await client.flushall()
        await client.script_flush()


@pytest.mark.promise("I10")
async def test_a_redis_that_is_emptied_under_load_is_told_again_and_nobody_notices(
    pods: Pods, valkey: OwnValkey
) -> None:
    here, there = [await pods(name, url=valkey.url, refresh_s=60.0) for name in ("here", "there")]
    users = [f"user{n}" for n in range(300)]
    for user_id in users:
        there.open(user_id, f"s-{user_id}")
    await quiet(there)
    ann = here.open("ann", "a1")
    here.presence.watch(ann, [*users[:150], "offline"])
    await until(lambda: len(ann.states) == 151, timeout=5, what="answers")
    await until(lambda: ann.online("offline")[-1:] == [False], timeout=5, what="offline")
    count = len(ann.frames)
    bob = there.limits.session("bob")
    for round_ in range(3):
        await flush(valkey)
        late, others = here.open("bea", f"late{round_}"), users[150 + 50 * round_ :][:50]
        here.presence.watch(late, others)
        bob.ask("sends", time.monotonic())
        here.kicks.opened("ann", "phone", round_)
        await until(
            lambda late=late, others=others: all(late.online(user_id)[-1:] == [True] for user_id in others),
            timeout=5,
            what="all online",
        )
        assert False not in {one["online"] for one in late.frames}
    assert len(ann.frames) == count, ann.frames[count:]
    there.presence.closed("s-user7")
    await told(ann, "user7", True, False)
    assert [number for _, _, number in there.replaced] == list(range(3))


async def test_a_new_store_gets_time_to_be_told_who_is_online(pods: Pods, valkey: OwnValkey) -> None:
    await flush(valkey)
    here = await pods("here", url=valkey.url)
    ann = here.open("ann", "a1")
    here.presence.watch(ann, ["bob"])
    await told(ann, "bob", None, False)


@pytest.mark.promise("I10")
async def test_while_redis_is_away_all_is_unknown_and_then_all_is_told_again(pods: Pods, valkey: OwnValkey) -> None:
    here, there = await pods("here", url=valkey.url), await pods("there", url=valkey.url)
    ann = here.open("ann", "a1")
    there.open("bob", "b1")
    there.open("cyd", "c1")
    await quiet(there)
    here.presence.watch(ann, ["bob", "cyd"])
    await told(ann, "bob", True)
    await told(ann, "cyd", True)
    since = ann.states["bob"]
    session = here.limits.session("ann")
    valkey.stop()
    await told(ann, "bob", True, None)
    await told(ann, "cyd", True, None)
    late = here.open("bea", "a2")
    here.presence.watch(late, ["bob"])
    await told(late, "bob", None)
    there.presence.closed("c1")
    there.kicks.opened("ann", "phone", 7)
    there.typing.typed("b1", "bob", "c")
    assert session.ask("sends", time.monotonic()).retry_after_ms == 0
    assert not await here.presence.drained(0.1)
    valkey.start()
    await told(ann, "bob", True, None, True)
    assert ann.states["bob"] == since
    await told(late, "bob", None, True)
    await told(ann, "cyd", True, None, False)
    there.kicks.opened("ann", "phone", 8)
    await until(lambda: here.replaced, timeout=5, what="news")
    assert here.replaced == [("ann", "phone", 8)], "what was told meanwhile is lost"
    assert await here.presence.drained(5)


async def test_a_redis_that_hangs_is_away(pods: Pods, valkey: OwnValkey) -> None:
    here, there = await pods("here", url=valkey.url), await pods("there", url=valkey.url)
    ann = here.open("ann", "a1")
    there.open("bob", "b1")
    await quiet(there)
    here.presence.watch(ann, ["bob"])
    await told(ann, "bob", True)
    with valkey.frozen():
        await told(ann, "bob", True, None)
        assert not here.link.available
        assert not there.link.available
    await told(ann, "bob", True, None, True)


async def test_a_subscription_that_is_cut_off_is_found_and_nothing_is_missed(pods: Pods, valkey: OwnValkey) -> None:
    here, there = await pods("here", url=valkey.url), await pods("there", url=valkey.url)
    ann = here.open("ann", "a1")
    here.presence.watch(ann, ["bob"])
    await until(lambda: ann.online("bob")[-1:] == [False], timeout=5, what="offline")
    async with Redis.from_url(valkey.url) as client:
        await client.client_kill_filter(_type="pubsub")
    there.open("bob", "b1")
    await until(lambda: ann.online("bob")[-1:] == [True], timeout=5, what="online")


async def test_a_subscription_that_is_silent_is_found(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = await pods("here"), await pods("there")
    ann = here.open("ann", "a1")
    here.presence.watch(ann, ["bob"])
    await until(lambda: ann.online("bob")[-1:] == [False], timeout=5, what="offline")

    async def silent(self: PubSub, *_: object, timeout: float) -> None:
        await asyncio.sleep(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(PubSub, "get_message", silent)
        there.open("bob", "b1")
        await until(lambda: not here.link.available, timeout=5, what="away")
    await until(lambda: ann.online("bob")[-1:] == [True], timeout=5, what="online")


async def test_it_ends_at_once_whatever_it_was_doing(valkey: OwnValkey, prefix: str) -> None:
    for turn in range(0, 60, 3):
        pod = Pod(valkey.url, prefix, "here")

        async def live(pod: Pod = pod) -> None:
            async with pod.running():
                for n in range(100):
                    pod.presence.watch(pod.open(f"user{n}", f"s{n}"), [f"user{m}" for m in range(20)])
                    pod.kicks.opened("ann", "phone", n)
                    await asyncio.sleep(0.001)

        task = asyncio.create_task(live())
        for _ in range(turn):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()


async def test_a_redis_that_takes_no_writes_is_away(pods: Pods, valkey: OwnValkey) -> None:
    here = await pods("here", url=valkey.url)
    async with Redis.from_url(valkey.url) as client:
        await client.config_set("maxmemory", "1")
        try:
            await until(lambda: not here.link.available, timeout=5, what="away")
        finally:
            await client.config_set("maxmemory", "0")
    await until(lambda: here.link.available, timeout=5, what="back")
