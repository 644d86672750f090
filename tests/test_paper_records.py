"""Records, gains and comparisons from history files written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl import preset, to_dict
from fedfp8.paper.compare import compare, curves_of, write_comparison
from fedfp8.paper.paper import AVERAGE_GAIN, CELLS, SETUPS, TABLE1, TABLES, deviations
from fedfp8.paper.paper_tables import docs_table, paper_table, update_docs
from fedfp8.paper.records import by_cell, communication_gain, find_runs, read_run
from fedfp8.paper.tables import Table, duration_text, size_text


def lines(accuracies: list[float | None], per_round: int) -> list[dict[str, Any]]:
    """Round 0 and one line per accuracy (None: not evaluated)."""
    found: list[dict[str, Any]] = [
        {"round": 0, "clients": [], "bytes_down": 0, "bytes_up": 0, "bytes_total": 0, "accuracy": 0.1, "rejected": []}
    ]
    for r, accuracy in enumerate(accuracies, 1):
        line: dict[str, Any] = {
            "round": r, "clients": [0, 1], "bytes_down": per_round // 2,
            "bytes_up": per_round - per_round // 2, "bytes_total": r * per_round, "rejected": [],
            "seconds": {"total": 2.0},
        }  # fmt: skip
        found.append(line if accuracy is None else line | {"accuracy": accuracy, "loss": 1.0})
    return found


def write_run(
    folder: Path, method: str, seed: int, accuracies: list[float | None], per_round: int,
    cell: str = "lenet-cifar10-iid", sizes: int | None = None,
) -> Path:  # fmt: skip
    path = folder / cell / f"{method}-seed{seed}"
    path.mkdir(parents=True)
    config = to_dict(preset(cell, method, seed=seed, round__count=len(accuracies)))
    (path / "config.toml").write_text(tomli_w.dumps(config))
    history = "".join(json.dumps(line) + "\n" for line in lines(accuracies, per_round))
    (path / "history.jsonl").write_text(history)
    if sizes is not None:
        (path / "sizes.json").write_text(json.dumps({"down_raw": sizes, "up_raw": sizes, "date": "2026-01-02"}))
    return path


def test_gain_takes_the_first_round_at_the_highest_common_accuracy() -> None:
    fp32 = lines([0.3, 0.5, 0.7, 0.8], 100)
    method = lines([0.2, None, 0.6, 0.75, 0.74], 10)
    gain = communication_gain(fp32, method)
    assert gain is not None
    # A = 0.75: FP32 is first at or above it in round 4 (400 bytes; no interpolation to 350), the method in round 4
    assert (gain.accuracy, gain.base.round, gain.method.round) == (0.75, 4, 4)
    assert gain.gain == 400 / 40


def test_gain_counts_the_best_round_not_the_last_and_ignores_round_0() -> None:
    falling = lines([0.05, 0.6, 0.4], 10)
    gain = communication_gain(lines([0.6, 0.9], 100), falling)
    assert gain is not None
    assert gain.gain == 100 / 20
    worse_than_untrained = communication_gain(lines([0.05], 100), lines([0.02], 10))
    assert worse_than_untrained is not None and worse_than_untrained.gain == 10
    assert communication_gain(lines([None], 1), lines([0.5], 1)) is None


def test_a_half_written_line_and_uncommitted_lines_are_not_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, "uq", 0, [0.2, 0.3], 10)
    committed = (path / "history.jsonl").stat().st_size
    with open(path / "history.jsonl", "a") as file:
        file.write('{"round": 3, "clients": [], "bytes_total": 99}\n{"round": 4, "cl')
    assert read_run(path).rounds == 3  # no checkpoint: every whole line counts
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "state.json").write_text(json.dumps({"history_bytes": committed}))
    assert read_run(path).rounds == 2


def test_damaged_records_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path, "uq", 0, [0.2], 10)
    (path / "history.jsonl").write_text("not json\n")
    with pytest.raises(RunError, match=r"history\.jsonl is damaged"):
        find_runs(tmp_path)
    with pytest.raises(RunError, match="is not a folder"):
        find_runs(tmp_path / "nothing")


def test_rows_are_means_over_seeds_and_gains_pair_seeds(tmp_path: Path) -> None:
    write_run(tmp_path, "fp32", 0, [0.4, 0.6], 400, sizes=100)
    write_run(tmp_path, "fp32", 1, [0.5, 0.8], 400, sizes=100)
    write_run(tmp_path, "uq", 0, [0.4, 0.6], 50, sizes=25)
    write_run(tmp_path, "uq", 1, [0.8, 0.7], 50, sizes=25)
    write_run(tmp_path, "dq", 0, [0.4, 0.6], 20)
    rows = {row.method: row for row in compare(find_runs(tmp_path))}
    assert list(rows) == ["fp32", "uq", "dq"]
    uq = rows["uq"]
    assert uq.accuracy.mean == pytest.approx(0.65) and uq.accuracy.std == pytest.approx(0.005**0.5)  # of 0.6 and 0.7
    # seed 0: 800 / 100; seed 1: A = 0.8, 800 / 50. Raw: 2 clients x 2 ways x size a round
    assert uq.gain is not None and uq.gain.mean == pytest.approx((8 + 16) / 2)
    assert uq.gain_raw is not None and uq.gain_raw.mean == pytest.approx((4 + 8) / 2)
    assert rows["dq"].gain_raw is None and rows["dq"].gain is not None and rows["dq"].accuracy.std is None
    (curve,) = [curve for curve in curves_of(find_runs(tmp_path)) if curve.method == "uq"]
    assert list(curve.bytes) == [50, 100] and list(curve.accuracy) == pytest.approx([0.6, 0.65])


def test_write_comparison_writes_what_scripts_read(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, "fp32", 0, [0.4, 0.6], 400), write_run(tmp_path, "uq", 0, [0.4, 0.6], 100)]
    comparison = write_comparison(tmp_path, runs)
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content["uq"]["accuracy"] == 0.6 and content["uq"]["bytes"] == 200
    assert content["uq"]["gain"] == 4 and content["uq"]["rounds"] == 2 and content["fp32"]["gain"] == 1
    assert content["uq"]["runs"] == ["lenet-cifar10-iid/uq-seed0"]
    assert "4.0×" in comparison.text and "| FP8 FedAvg-UQ | 60.0 |" in (tmp_path / "compare.md").read_text()
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "compare.pdf").read_bytes().startswith(b"%PDF")


def test_the_papers_numbers_agree_with_its_own_averages() -> None:
    for method, average in AVERAGE_GAIN.items():
        gains = [numbers[method].gain or 0.0 for numbers in TABLE1.values()]
        assert round(sum(gains) / len(gains), 1) == average


@pytest.mark.parametrize("cell", CELLS)
def test_presets_are_the_papers_setup(cell: str) -> None:
    config = to_dict(preset(cell, "uq"))
    assert deviations(cell, config) == []
    assert SETUPS[cell]  # something was compared
    config["round"]["count"] = 7
    paper = SETUPS[cell]["round.count"]
    assert deviations(cell, config) == [f"round.count 7 (paper: {paper})"]


def test_paper_table_has_ours_beside_the_papers_and_says_what_is_short(tmp_path: Path) -> None:
    write_run(tmp_path, "fp32", 0, [0.4, 0.6], 400, sizes=100)
    path = write_run(tmp_path, "uq", 0, [0.4, 0.6], 50, sizes=25)
    text = (path / "config.toml").read_text().replace("fraction = 0.1", "fraction = 0.05")
    (path / "config.toml").write_text(text)
    table = paper_table(TABLES["table1"], by_cell(find_runs(tmp_path)))
    assert len(table.rows) == 36
    assert list(table.rows[1])[3:] == [
        "FP8 FedAvg-UQ", "82.0 ± 0.1", "60.0", "4.1×", "4.0×", "8.0×", "2 (1000)", "1", "100 B"
    ]  # fmt: skip
    assert list(table.rows[2])[5] == "–"  # UQ+ was not run
    assert any("clients.fraction 0.05 (paper: 0.1)" in note for note in table.notes)


def test_two_runs_for_one_place_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "uq", 0, [0.4], 50)
    write_run(tmp_path / "b", "uq", 0, [0.4], 50)
    with pytest.raises(RunError, match="both lenet-cifar10-iid, uq, seed 0"):
        by_cell(find_runs(tmp_path))


def test_docs_are_refreshed_between_markers(tmp_path: Path) -> None:
    path = write_run(tmp_path, "fp32", 0, [0.4, 0.6], 400, sizes=100) / "config.toml"
    path.write_text(path.read_text().replace("augment = true", "augment = false"))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- records:begin -->\nold\n<!-- records:end -->\nafter\n")
    groups = by_cell(find_runs(tmp_path))
    for _ in range(2):  # the second time changes nothing
        update_docs(page, groups)
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
        assert "| lenet-cifar10-iid | fp32 | 82.1 ± 0.1 / 1.0× | 60.0 / 1.0× raw, 1.0× sent | 2 rounds" in text
        assert "--only lenet-cifar10-iid --methods fp32 --rounds 2 --seeds 0 --set local.augment=false`" in text
        assert "--only lenet-cifar10-dir --methods fp32`" in text  # not run yet: at the paper's length
    assert len(docs_table(groups).rows) == 36
    page.write_text("no markers")
    with pytest.raises(ConfigError, match="records:begin"):
        update_docs(page, groups)


def test_how_numbers_are_written() -> None:
    assert [size_text(v) for v in (12, 999_600, 1_280_000_000)] == ["12 B", "1 MB", "1.28 GB"]
    assert [duration_text(v) for v in (5, 600, 7200, 8 * 86400)] == ["5 s", "10 min", "2.0 h", "8.0 days"]
    assert Table("", ["a", "b"], [["x|y", "1"]]).markdown() == "| a | b |\n|---|---|\n| x\\|y | 1 |\n"
    assert "&lt;b&gt;" in Table("", ["a"], [["<b>"]]).html()
