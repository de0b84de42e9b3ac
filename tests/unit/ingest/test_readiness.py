from services.ingest.readiness import out_of_room


def test_room_is_a_tenth_of_the_last_partition() -> None:
    assert out_of_room(1, 900, 1000) is None
    assert out_of_room(989, 900, 1000) is None
    assert out_of_room(990, 900, 1000) is not None
    assert "for 0 more ids" in str(out_of_room(5000, 900, 1000))
