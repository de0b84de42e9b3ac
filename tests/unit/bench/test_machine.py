from bench.machine import cpu_model, machine


def test_the_model_is_the_first_processors_name() -> None:
    text = "processor\t: 0\nvendor_id\t: X\nmodel name\t: Some CPU @ 2.00GHz: fast\nmodel name\t: other\n"
    assert cpu_model(text) == "Some CPU @ 2.00GHz: fast"


def test_a_text_without_a_name_has_none() -> None:
    assert cpu_model("processor : 0\nmodel name :\n") is None


def test_the_machine_is_told_whole() -> None:
    found = machine()
    assert set(found) == {"cpu", "cores", "memory_gib", "system", "python"}
    assert int(found["cores"]) >= 1
    assert float(found["memory_gib"]) > 0
