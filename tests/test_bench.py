"""`fedfp8 bench`: tables, their files, the pages made of them, and the arithmetic of docs/million-clients.md."""

import json
from pathlib import Path

import pytest

from fedfp8.bench import million, numerics, scale, tables
from fedfp8.errors import ConfigError, RunError

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "benchmarks.md", DOCS / "million-clients.md"]


def test_a_quick_run_is_shown_and_kept_with_its_circumstances(fedfp8_command, tmp_path: Path) -> None:
    code, out, err = fedfp8_command("bench", "--only", "numerics,known", "--quick", "--keep", str(tmp_path))
    assert code == 0, err
    assert "quantize" in out and tables.TABLES["numerics"].about in out
    kept = json.loads((tmp_path / "numerics.json").read_text())
    assert {row["name"] for row in kept["rows"]} >= {"copy_", "quantize", "undither"}
    assert {"processor", "torch", "numba", "python", "commit", "date", "load"} <= set(kept["machine"])
    assert json.loads((tmp_path / "known.json").read_text())["rows"][0]["clients"] == 2000
    with pytest.raises(RunError, match="of a trial"):
        tables.read("numerics", tmp_path)
    with pytest.raises(RunError, match="--only wire"):
        tables.read("wire", tmp_path)


def test_json_is_all_that_goes_to_standard_output(fedfp8_command, monkeypatch) -> None:
    rows = [{"name": "x", "size": 1, "microseconds": 1.0, "ratio": 2.0, "budget": 3.0, "ok": False}]
    monkeypatch.setattr(numerics, "run_training", lambda turns: rows)
    code, out, err = fedfp8_command("bench", "--only", "training", "--quick", "--json")
    assert code == 0, err
    assert [(t["table"], t["quick"], t["rows"]) for t in json.loads(out)] == [("training", True, rows)]
    assert tables.shown("training", rows)[0]["budget"] == "3: **missed**"
    assert "unknown table 'nothing'" in fedfp8_command("bench", "--only", "nothing")[2]


def test_scripts_are_called_with_the_arguments_of_a_trial_and_their_failures_are_told(tmp_path, monkeypatch) -> None:
    assert tables.chosen("") == list(tables.TABLES)  # every script is there
    monkeypatch.setattr(tables, "SCRIPTS", tmp_path)
    assert tables.chosen("") == [name for name, table in tables.TABLES.items() if not table.script]
    with pytest.raises(ConfigError, match="step needs the scripts"):
        tables.chosen("step")
    (tmp_path / "bench_wire.py").write_text("import json, sys\nprint(json.dumps([{'given': sys.argv[1:]}]))")
    assert tables.measure("wire")["rows"] == [{"given": ["--json"]}]
    assert tables.measure("wire", quick=True)["rows"] == [{"given": ["--json", "--elements", "4096"]}]
    (tmp_path / "bench_flower_wrapper.py").write_text(
        "import json, sys\nprint('talk')\nopen(sys.argv[2], 'w').write(json.dumps({'many': {'weights': 5}}))"
    )
    assert tables.measure("wrapper")["rows"] == [{"case": "many", "weights": 5}]
    (tmp_path / "bench_wire.py").write_text("raise SystemExit('no data')")
    with pytest.raises(RunError, match="no data"):
        tables.measure("wire")


def test_every_table_is_on_the_page_and_every_file_is_a_measurement() -> None:
    page = PAGES[0].read_text()
    for name in tables.TABLES:
        assert f"<!-- bench:{name} -->" in page, name
        if (tables.RESULTS / f"{name}.json").exists():
            kept = tables.read(name)
            assert kept["table"] == name and kept["rows"] and kept["machine"]["load"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_pages_show_the_tables_that_were_kept(page: Path, tmp_path: Path) -> None:
    """`fedfp8 bench --docs PAGE` would change nothing."""
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    assert tables.update_docs([copy])
    assert copy.read_text() == page.read_text()
    copy.write_text("no markers")
    with pytest.raises(ConfigError, match="bench:TABLE"):
        tables.update_docs([copy])


def test_docs_are_made_of_files_by_the_command(fedfp8_command, tmp_path: Path) -> None:
    rows = [{"wire": "dq", "code, MB/s": 123.4}]
    content = {"table": "link", "quick": False, "seconds": 1.0} | tables.with_machine(rows, 0.5)
    tables.keep(content, tmp_path)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench:link -->\nold\n<!-- bench:end -->\nafter\n")
    for _ in range(2):  # the second time changes nothing
        code, out, err = fedfp8_command("bench", "--docs", str(page), "--keep", str(tmp_path))
        assert code == 0 and "put: link" in out, err
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
        assert "| dq | 123 |" in text and "load 0.5 to" in text
    page.write_text(page.read_text().replace("bench:link", "bench:step"))
    tables.update_docs([page], tmp_path)
    assert "Not measured yet: `fedfp8 bench --only step`" in page.read_text() and "123" not in page.read_text()


def test_a_simulated_round_has_real_messages() -> None:
    found = scale.simulate("digits", 12, 4, "dq", 2)
    assert found["messages"] == 8 and 0 <= found["holding"] <= 8
    assert found["weights"] == 38_282 and found["history"] > 4 * 4 * found["weights"]  # several models of float32
    assert 0 < found["bytes_up"] < found["messages"] * found["weights"] / 8  # DQ: below a bit a weight
    assert 0 < found["bytes_down"] < found["messages"] * found["weights"] / 4
    assert all(found[part] > 0 for part in ("code", "decode", "add"))


def test_what_a_million_clients_need() -> None:
    unit = million.Unit("m", 1_000_000, 20.0, 1.0, 0.5, 50e6, 64e6, 200.0, 30.0)
    need = million.needs(unit, clients=864_000, visits_a_day=0.5)
    assert need == million.Needs(visits=5.0, cores=0.1, down=5e6, up=2.5e6, memory=222.8e6, disk=89.92e6)
    large = unit.scaled(10_000_000)
    assert (large.visit_ms, large.memory, large.disk, large.bits_down) == (200.0, 500e6, 640e6, 1.0)
    text = million.arithmetic(unit, clients=864_000, visits_a_day=0.5)
    for line in ("= 5 a second", "5 / s x 20 ms = 0.1", "= 5 Mbit/s", "= 2.5 Mbit/s", "= 223 MB", "= 89.9 MB"):
        assert line in text, line


def test_unit_costs_are_those_of_a_models_largest_federation() -> None:
    def row(model: str, weights: int, clients: int, ms: float) -> dict:
        return {
            "model": model, "weights": weights, "clients": clients, "ms_per_client": ms, "bits_down": 1.0,
            "bits_up": 0.5, "memory_mb": 10.0, "history_mb": 5.0,
        }  # fmt: skip

    known = [{"memory_bytes": 200.0, "json_bytes": 30.0}]
    rows = [row("resnet18", 1000, 10, 9.0), row("lenet", 100, 1000, 3.0), row("lenet", 100, 10, 2.0)]
    found = million.units(rows, known)
    assert [(unit.name, unit.visit_ms) for unit in found[:2]] == [("LeNet", 3.0), ("ResNet18", 9.0)]
    assert found[2].weights == million.LARGE and found[2].visit_ms == pytest.approx(9.0 * million.LARGE / 1000)
    text = million.markdown(rows, known)
    assert "| LeNet | 100 | 3 |" in text and "LeNet, line by line" in text


def test_prose_between_two_tables_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    mark = "<!-- bench:{} -->\n<!-- bench:end -->\n"
    page.write_text(mark.format("link") + "between\n" + mark.format("wire") + "after\n")
    assert tables.update_docs([page], tmp_path) == ["link", "wire"]
    assert page.read_text().count("Not measured yet") == 2 and "between\n<!-- bench:wire -->" in page.read_text()
