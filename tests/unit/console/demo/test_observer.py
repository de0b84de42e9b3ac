from __future__ import annotations

from services.console.demo.observer import Observer


def test_in_flight_is_written_and_not_yet_displayed_elsewhere() -> None:
    observer = Observer()
    observer.left("a", 1.0)
    observer.left("b", 1.5)
    observer.left("a", 2.0)
    assert observer.in_flight() == 2
    observer.arrived("a", 3.0)
    observer.arrived("a", 4.0)
    observer.arrived("creation", 4.0)
    assert observer.in_flight() == 1


def test_unticked_is_displayed_by_a_user_and_not_yet_ticked() -> None:
    observer = Observer()
    observer.displayed("direct", "ben", 4)
    observer.displayed("direct", "ben", 3)
    observer.displayed("group", "ben", 9)
    assert observer.unticked({"direct"}) == 4
    observer.ticked("direct", "ben", 3)
    observer.ticked("direct", "ben", 1)
    assert observer.unticked({"direct"}) == 1
    observer.ticked("direct", "ben", 5)
    assert observer.unticked({"direct"}) == 0


async def test_recovery_is_the_first_display_of_what_left_after_the_kill() -> None:
    observer = Observer()
    observer.left("before", 9.9)
    with observer.recovery(10.0) as recovered:
        observer.left("after", 10.1)
        observer.left("later", 10.2)
        observer.arrived("before", 10.3)
        assert not recovered.done()
        observer.arrived("later", 12.0)
        observer.arrived("after", 13.0)
        assert await recovered == 12.0
    observer.left("much later", 20.0)
    observer.arrived("much later", 21.0)
