from pathlib import Path

import pytest

from bench import report, results
from bench.words import words_on
from tests.unit.bench.results_of import of


@pytest.mark.parametrize("name", ["send", "e2e", "relay", "gateway", "receipts"])
def test_a_table_has_a_cell_for_every_heading(name: str) -> None:
    result = of(name)
    width = len(report.headings(result))
    assert all(len(row) == width for row in report.rows(result))
    assert [bool({"6.1 ×", "120 ×", "7.3 ×", "1.5 ×"} & {*row}) for row in report.rows(result)].count(True) == 1


def test_a_figure_below_a_hundred_keeps_its_decimal_and_a_large_one_is_grouped() -> None:
    assert report.rows(of("send"))[0][1:] == ("6,123", "300", "900", "120")
    assert report.rows(of("e2e"))[-1][1:3] == ("0.3 ×", "0.4 ×")
    assert report.rows(of("gateway"))[0][5:9] == ("1,200,000", "0.73", "12.5", "0.64")


def test_a_benchmark_that_is_not_known_is_told_by_its_ratio() -> None:
    result = {"name": "another", "waybill": {"p50_ms": 2.0}, "peer": {"p50_ms": 8.0}, "ratio": {"p50_ms": 4.0}}
    assert report.headings(result) == ("", "p50 ms")
    assert report.rows(result)[-1] == ("better by", "4.0 ×")
    assert words_on(result) == []


def test_the_words_say_the_figures_of_this_result() -> None:
    said = " ".join(words_on(of("send")))
    assert "2,000 sends wait" in said
    assert "lead is 2.5 × in place of 6.1 ×" in said
    said = " ".join(words_on(of("e2e")))
    assert "p50 4.0 ms and p99 9.0 ms" in said
    assert "In a turn of the push 17 messages" in said
    said = " ".join(words_on(of("relay")))
    assert "A backlog of 200,000 rows is drained" in said
    assert "memory 91 MiB in the first quarter of the time, 92 in the last one, 97 at most" in said
    said = " ".join(words_on(of("gateway")))
    assert "at most 14 ms after Kafka had them" in said
    assert "88 % of the sessions that came back" in said
    assert "p50 11.0 ms and p99 33.3 ms" in said
    assert "adds 41 KiB to the gateway's memory; the kernel holds 60 KiB" in said
    assert "in one go" not in " ".join(words_on({**of("relay"), "deep": {}}))


def test_the_words_on_receipts_say_what_grows() -> None:
    said = " ".join(words_on(of("receipts")))
    assert "drains 200,000 acks" in said
    assert "11.0 s per 1 M acks" in said
    assert "1 M messages leave 919 MiB in Postgres: `event` 456, `transition` 458, `receipt` 5.2." in said
    assert "Transitions per message: `delivered` 2.67, `read` 1.02." in said
    assert report.headings(of("receipts"))[1:3] == ("acks/s", "p50 ms")
    alone = {"name": "receipts", "waybill": {"rate_s": 5.0}, "settings": {}}
    assert words_on(alone) == []
    assert report.rows(alone) == [("Waybill", "5")]


def test_what_was_not_measured_of_gateways_is_not_told() -> None:
    alone = {"name": "gateway", "waybill": {"a_cpu_us": 8.0}, "turns": {"waybill": [{"a_p50_ms": 2.0}]}}
    assert words_on(alone) == []
    assert report.headings(alone) == ("", "a: CPU µs per delivery")
    assert report.rows(alone) == [("Waybill", "8")]


def test_the_page_is_made_from_what_is_kept(tmp_path: Path) -> None:
    folder, page = tmp_path / "results", tmp_path / "docs" / "performance.md"
    for name in ("e2e", "send"):
        results.keep(of(name), folder)
    report.write(folder, page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Performance\n")
    assert text.index("(`send`)") < text.index("(`e2e`)")
    assert text.count("2026-01-02, A CPU, 2 cores, 8.0 GiB, Linux 6, Python 3.11.7: `waybill bench ") == 2
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.count("|") == 6


def test_a_later_result_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    results.keep(of("send"), tmp_path)
    results.keep({**of("send"), "date": "2027-01-01"}, tmp_path)
    assert [result["date"] for result in results.kept(tmp_path)] == ["2027-01-01"]


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "send.json").write_text('{"name": "other"}')
    with pytest.raises(ValueError, match="is not the result of a benchmark"):
        results.kept(tmp_path)
