"""Rates: what may pass, how long to wait, and when a client is far over."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.limits import GRANTED, KINDS, Limits, Patience, Rate, Rates

gaps = st.one_of(st.just(0.0), st.floats(0.0, 3.0))
rates = st.builds(Rate, st.floats(0.1, 1000.0), st.integers(1, 50).map(float))
SENDS = KINDS.index("sends")


def session(rate: Rate, **more: Patience) -> Rates:
    return Limits({"sends": rate}, {}, **more).session("ann")


@given(rates, st.lists(gaps, max_size=80), st.floats(0.0, 1e6))
def test_no_more_than_the_burst_and_the_rate_pass_in_any_span(rate: Rate, waits: list[float], start: float) -> None:
    rated = session(rate)
    passed = [now for now in itertools.accumulate(waits, initial=start) if rated.ask("sends", now) is GRANTED]
    for first, last in itertools.combinations(range(len(passed)), 2):
        span = passed[last] - passed[first]
        assert last - first + 1 <= rate.burst + rate.per_s * span + 1e-3


@given(rates, st.lists(gaps, max_size=80))
def test_who_asks_no_more_than_a_plain_bucket_gives_is_never_refused(rate: Rate, waits: list[float]) -> None:
    rated, tokens, before = session(rate), rate.burst, 0.0
    for now in itertools.accumulate(waits):
        tokens, before = min(rate.burst, tokens + (now - before) * rate.per_s), now
        if tokens >= 1 + 1e-6:
            assert rated.ask("sends", now) is GRANTED
            tokens -= 1


@given(rates, st.integers(0, 100), st.floats(0.0, 1e6))
def test_who_waits_as_long_as_told_passes_and_who_waits_less_does_not(rate: Rate, asked: int, now: float) -> None:
    rated = session(rate)
    for _ in range(asked):
        rated.ask("sends", now)
    verdict = rated.ask("sends", now)
    if verdict.retry_after_ms:
        wait_s = verdict.retry_after_ms / 1000
        assert rated.ask("sends", now + max(0.0, wait_s - 0.002)).retry_after_ms or rate.per_s > 400
        assert rated.ask("sends", now + wait_s) is GRANTED


def test_a_kind_with_no_rate_has_no_limit() -> None:
    rated = session(Rate(0.0, 1.0))
    assert all(rated.ask("sends", 0.0) is GRANTED for _ in range(10_000))
    assert Limits({}, {}).session("ann").ask("creates", 0.0) is GRANTED


def test_every_frame_counts_as_a_frame_and_what_is_refused_takes_nothing() -> None:
    limits = Limits({"frames": Rate(1.0, 10.0), "sends": Rate(1.0, 3.0)}, {})
    rated = limits.session("ann")
    granted = [rated.ask("sends", 0.0) is GRANTED for _ in range(20)]
    assert granted == [True] * 3 + [False] * 17
    granted = [rated.ask("frames", 0.0) is GRANTED for _ in range(20)]
    assert granted == [True] * 7 + [False] * 13
    verdict = rated.ask("pulls", 0.0)
    assert (verdict.scope, verdict.retry_after_ms) == ("session", 1000), "frames, since pulls have no rate"
    granted = [rated.ask("sends", 3.0) is GRANTED for _ in range(4)]
    assert granted == [True] * 3 + [False], "frames refused it, so no send was taken"


def test_sessions_of_a_user_share_its_rate_and_others_do_not() -> None:
    limits = Limits({"sends": Rate(1.0, 8.0)}, {"sends": Rate(1.0, 10.0)})
    phone, laptop, other = limits.session("ann"), limits.session("ann"), limits.session("bob")
    assert [phone.ask("sends", 0.0).scope for _ in range(9)] == [""] * 8 + ["session"]
    assert [laptop.ask("sends", 0.0).scope for _ in range(3)] == ["", "", "user"]
    assert other.ask("sends", 0.0) is GRANTED


def test_who_comes_back_finds_its_buckets_as_they_were_until_they_are_full() -> None:
    limits = Limits({}, {"sends": Rate(1.0, 5.0)})
    for _ in range(2):
        rated = limits.session("ann")
        granted = [rated.ask("sends", 0.0) is GRANTED for _ in range(5)]
        limits.closed(rated)
        limits.tidy(1.0)
    assert granted == [False] * 5
    limits.usage(10)
    limits.tidy(4.9)
    assert len(limits._users) == 1
    limits.tidy(5.1)
    assert not limits._users
    assert not limits._left


def test_tidying_looks_at_each_in_turn() -> None:
    limits = Limits({}, {"sends": Rate(1.0, 5.0)})
    for number in range(30):
        rated = limits.session(f"user{number}")
        if number < 20:
            rated.ask("sends", 0.0)
        limits.closed(rated)
    limits.usage(100)
    for _ in range(3):
        limits.tidy(0.5, most=10)
    assert len(limits._users) == 20, "those behind busy ones were reached"


def test_what_other_gateways_know_limits_until_then() -> None:
    limits = Limits({}, {"sends": Rate(10.0, 100.0)})
    rated = limits.session("ann")
    limits.limit("ann", SENDS, 7.5)
    verdict = rated.ask("sends", 5.0)
    assert (verdict.scope, verdict.retry_after_ms) == ("shared", 2500)
    assert rated.ask("pulls", 5.0) is GRANTED
    assert rated.ask("sends", 7.5) is GRANTED
    limits.limit("nobody", SENDS, 7.5)


def test_usage_is_told_once_and_only_what_passed_of_shared_kinds() -> None:
    limits = Limits({"sends": Rate(1.0, 3.0)}, {"sends": Rate(1.0, 100.0), "frames": Rate(1.0, 100.0)})
    rated = limits.session("ann")
    for _ in range(5):
        rated.ask("sends", 0.0)
    rated.ask("frames", 0.0)
    rated.ask("pulls", 0.0)
    limits.closed(rated)
    (usage,) = limits.usage(10)
    assert (usage.user_id, dict(zip(KINDS, usage.counts, strict=True))) == (
        "ann",
        {"frames": 0, "sends": 3, "pulls": 0, "presence": 0, "creates": 0},
    )
    assert limits.usage(10) == []


def test_a_burst_that_was_sent_before_the_refusal_could_be_read_is_forgiven() -> None:
    rated = session(Rate(50.0, 500.0))
    assert not any(rated.ask("sends", 0.0).far_over for _ in range(10_000))


def test_who_goes_on_is_far_over_but_never_at_its_first_refusal() -> None:
    rated = session(Rate(50.0, 500.0), patience=Patience(refusals=20, window_s=10.0, heed_s=1.0))
    verdicts = [rated.ask("sends", n / 1000) for n in range(2_000)]
    refused = [verdict for verdict in verdicts if verdict.retry_after_ms]
    far = [n for n, verdict in enumerate(verdicts) if verdict.far_over]
    assert not refused[0].far_over
    first_refusal = next(n for n, verdict in enumerate(verdicts) if verdict.retry_after_ms)
    assert far
    assert far[0] >= first_refusal + 1_000, "it had a second to read of it"


@given(st.floats(1.0, 100.0))
@example(1.9)
def test_who_is_a_little_over_now_and_then_is_never_far_over(every_s: float) -> None:
    rated = session(Rate(0.001, 1.0), patience=Patience(refusals=20, window_s=10.0))
    assert not any(rated.ask("sends", n * every_s).far_over for n in range(300))


def test_no_patience_setting_means_nobody_is_far_over() -> None:
    rated = session(Rate(1.0, 1.0), patience=Patience(refusals=0))
    assert not any(rated.ask("sends", n / 1000).far_over for n in range(20_000))


@given(st.lists(st.tuples(st.sampled_from(KINDS), gaps), max_size=60))
def test_a_refusal_always_names_a_time_and_a_scope(asked: list[tuple[str, float]]) -> None:
    some = {kind: Rate(2.0, 3.0) for kind in KINDS}
    rated, now = Limits(some, {kind: Rate(1.0, 4.0) for kind in KINDS}).session("ann"), 0.0
    for kind, gap in asked:
        now += gap
        verdict = rated.ask(kind, now)
        assert (verdict.retry_after_ms > 0) == (verdict.scope != "") == (verdict is not GRANTED)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_each_kind_has_its_own_bucket(kind: str) -> None:
    rated = Limits({kind: Rate(1.0, 2.0)}, {}).session("ann")
    for other in KINDS:
        granted = [rated.ask(other, 0.0) is GRANTED for _ in range(3)]
        expected = [True, True, False] if other == kind else [True] * 3
        assert granted == expected, other
