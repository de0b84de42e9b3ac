from typing import Any

import pytest

from bench import cells
from bench.cells import CELLS, Cell
from bench.figures import ratio


def answer(**changes: Any) -> dict[str, Any]:
    """What the load client prints of a fan-out; it leaves out what is 0."""
    return {
        "mode": "fanout",
        "connections": 500,
        "expected_deliveries": 750_000,
        "deliveries": 750_000,
        "deliveries_per_s": 50_003,
        "latency_ms": {"n": 750_000, "p50": 2.5, "p90": 4.0, "p99": 9.5, "max": 20.0},
        "order_errors": 0,
        "gaps": 0,
        "duplicates": 0,
        "connections_lost": 0,
        "produce_failed": 0,
        "window_s": 15.0,
        "server_cpu_s": 9.0,
        "client_cpu_s": 6.0,
        "broker_cpu_s": 3.0,
        "other_cpu_s": 1.5,
        "server_cpu_us_per_delivery": 12.04,
        "server_rss_kib_after": 40_000,
        **changes,
    }


@pytest.mark.promise("protocol.8.bench")
def test_the_figures_are_those_of_the_protocol() -> None:
    named = "a_cpu_us a_p99_ms b_cpu_us b_p99_ms c_deliveries_s c_cpu_us d_kib_per_session e_seconds"
    assert list(cells.COMPARED) == named.split()
    of_each = [figure for name in cells.BOTH for figure in cells.figures(name, answer())]
    assert of_each == [*named.split(), *cells.FURTHER]


def test_a_figure_is_where_the_load_client_tells_it() -> None:
    assert cells.figures("a", answer()) == {"a_cpu_us": 12.04, "a_p99_ms": 9.5}
    assert cells.figures("c", answer()) == {"c_deliveries_s": 50_003, "c_cpu_us": 12.04}
    idle = {"mode": "idle", "server_rss_kib_per_connection": 14.5}
    assert cells.figures("d", idle) == {"d_kib_per_session": 14.5}
    back = {"mode": "reconnect", "reconnect_s": 0.65, "server_cpu_us_per_reconnect": 116.0}
    assert cells.figures("e", back) == {"e_seconds": 0.65, "e_cpu_us": 116.0}
    sent = answer(mode="send", sent_ms={"p99": 18.0})
    assert cells.figures("send", sent) == {"send_p50_ms": 2.5, "send_p99_ms": 9.5, "sent_p99_ms": 18.0}


def test_more_deliveries_are_better_and_less_of_anything_else() -> None:
    waybill = {"a_cpu_us": 6.0, "c_deliveries_s": 2_000_000.0, "e_seconds": 1.3}
    peer = {"a_cpu_us": 12.0, "c_deliveries_s": 1_000_000.0, "e_seconds": 0.65}
    assert ratio(waybill, peer) == {"a_cpu_us": 2.0, "c_deliveries_s": 2.0, "e_seconds": 0.5}


def test_cores_are_told_by_who_used_them() -> None:
    told = cells.details("a", answer())
    assert (told["a_server_cores"], told["a_client_cores"]) == (0.6, 0.4)
    assert (told["a_known_cores"], told["a_other_cores"]) == (0.2, 0.1)
    assert (told["a_p50_ms"], told["a_max_ms"]) == (2.5, 20.0)


def test_a_clean_cell_has_no_errors() -> None:
    assert cells.errors(answer()) == {}
    assert cells.errors({"mode": "idle", "deliveries": 0}) == {}


@pytest.mark.parametrize("name", ["order_errors", "gaps", "duplicates", "connections_lost", "produce_failed"])
def test_whatever_went_wrong_is_an_error(name: str) -> None:
    assert cells.errors(answer(**{name: 3})) == {name: 3}


def test_problems_and_what_did_not_arrive_are_errors() -> None:
    wrong = answer(deliveries=749_990, problems={"error not_found": 2})
    assert cells.errors(wrong) == {"not_delivered": 10, "error not_found": 2}


def test_errors_of_several_turns_are_added_and_told_by_side_and_cell() -> None:
    both = cells.added({"gaps": 1, "duplicates": 2}, {"gaps": 3, "lost": 1})
    assert both == {"gaps": 4, "duplicates": 2, "lost": 1}
    assert cells.told({"waybill": {"a": both}, "peer": {}}) == ["waybill, a: 4 gaps, 2 duplicates, 1 lost"]
    assert cells.told(cells.errors_of({"name": "send"})) == []


def test_a_cell_says_its_flags() -> None:
    assert " ".join(CELLS["b"].flags(15)) == "-mode fanout -n 1000 -convs 200 -members 5 -rate 2000 -dur 15s"
    assert " ".join(CELLS["c"].flags(2.5)) == "-mode flood -n 500 -convs 1 -members 500 -dur 2.5s"
    assert "-n 10000 -convs 2000 -members 5 -dur 30s -settle 20s" in " ".join(CELLS["d"].flags(15))


@pytest.mark.parametrize("name", [*CELLS])
def test_the_cells_are_as_large_as_the_peers_own(name: str) -> None:
    sizes = {"a": 500, "b": 1_000, "c": 500, "d": 10_000, "e": 5_000, "send": 1_000}
    assert CELLS[name].connections == sizes[name]
    assert CELLS[name].scaled(1) == CELLS[name]


def test_a_smaller_cell_has_fewer_members_or_fewer_conversations_at_the_same_load_each() -> None:
    assert CELLS["a"].scaled(0.1) == Cell("fanout", 1, 50, rate=100)
    assert CELLS["b"].scaled(0.1) == Cell("fanout", 20, 5, rate=200)
    assert CELLS["e"].scaled(0.0001).connections == 5


def test_what_comes_straight_to_kafka_is_copied_into_the_store() -> None:
    assert [name for name, cell in CELLS.items() if cell.shadowed] == ["a", "b", "c"]


def test_cells_are_chosen_by_name_in_their_own_order() -> None:
    assert cells.chosen("send, a") == ("a", "send")
    assert cells.chosen(",".join(cells.ALL)) == cells.ALL
    with pytest.raises(ValueError, match="no cell 'x'"):
        cells.chosen("a,x")


def test_the_largest_cell_says_how_many_files_are_needed() -> None:
    assert 10_000 < cells.files_needed(cells.ALL, 1) < 20_000
    assert cells.files_needed(["a"], 1) < 1_000
    assert cells.files_needed([cells.STALLED], 1) > 0


def test_a_metric_is_summed_over_its_samples() -> None:
    text = '# HELP x_total What.\nx_total{kind="a"} 2.0\nx_total{kind="b"} 3.0\nx_total_created 9.0\ny 7.0\n'
    assert cells.total(text, "x_total") == 5.0
    assert cells.total(text, "y") == 7.0
    with pytest.raises(ValueError, match="no metric x"):
        cells.total(text, "x")


def test_shares_and_additions_are_never_below_nothing() -> None:
    assert cells.without_reads(0, 5_000) == 1.0
    assert cells.without_reads(1_000, 5_000) == 0.8
    assert cells.without_reads(6_000, 5_000) == 0.0
    assert cells.added_kib(13_000, 12_000, 20) == 50.0
    assert cells.added_kib(11_000, 12_000, 20) == 0.0
