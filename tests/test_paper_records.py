"""Records, gains and comparisons from history files written by hand."""

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl import preset, to_dict
from fedfp8.fl.settings import parse_assignment
from fedfp8.paper.compare import compare, curves_of, gains_of, write_comparison
from fedfp8.paper.docs import curve_table, docs_tables, refreshed, update_docs
from fedfp8.paper.jobs import plan
from fedfp8.paper.paper import AVERAGE_GAIN, CELLS, SETUPS, TABLE1, TABLES, deviations, not_preset
from fedfp8.paper.paper_tables import paper_runs, paper_table
from fedfp8.paper.plots import Curve, accuracy_against_bytes, add_legend, draw_curves, name_of, new_figure
from fedfp8.paper.records import (
    TEST_SETS,
    Metric,
    RunRecord,
    by_cell,
    communication_gain,
    find_runs,
    gain_between,
    longest,
    points_of,
    read_run,
    variants,
)
from fedfp8.paper.report import write_report
from fedfp8.paper.tables import NOT_LEARNED, Table, duration_text
from fedfp8.text import size_text


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
    cell: str = "lenet-cifar10-iid", sizes: int | None = None, name: str = "", **settings: Any,
) -> Path:  # fmt: skip
    path = folder / cell / (name or f"{method}-seed{seed}")
    path.mkdir(parents=True)
    config = to_dict(preset(cell, method, seed=seed, round__count=len(accuracies), **settings))
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
    assert (gain.value, gain.base.round, gain.method.round) == (0.75, 4, 4)
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
    (curve,) = [curve for curve in curves_of(find_runs(tmp_path)) if curve.label == "uq"]
    assert list(curve.bytes) == [50, 100] and list(curve.values) == pytest.approx([0.6, 0.65])


def test_write_comparison_writes_what_scripts_read(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, "fp32", 0, [0.4, 0.6], 400), write_run(tmp_path, "uq", 0, [0.4, 0.6], 100)]
    comparison = write_comparison(tmp_path, runs)
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content["uq"]["accuracy"] == 0.6 and content["uq"]["bytes"] == 200
    assert content["uq"]["gain"] == 4 and content["uq"]["rounds"] == 2 and content["fp32"]["gain"] == 1
    assert content["uq"]["runs"] == ["lenet-cifar10-iid/uq-seed0"]
    assert "4.0×" in comparison.text() and "| FP8FedAvg-UQ | 60.0 |" in (tmp_path / "compare.md").read_text()
    for width, gone in ((200, []), (80, ["seeds"]), (60, ["seeds", "raw", "rounds"])):
        header, *lines = comparison.text(width).splitlines()
        assert all(len(line) <= width for line in [header, *lines]) and "accuracy (%)" in header and "4.0×" in lines[-1]
        assert [name for name in ("seeds", "raw", "rounds", "up", "down") if name not in header] == gone
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "compare.pdf").read_bytes().startswith(b"%PDF")


def test_the_papers_numbers_agree_with_its_own_averages() -> None:
    for method, average in AVERAGE_GAIN.items():
        gains = [numbers[method].gain or 0.0 for numbers in TABLE1.values()]
        assert round(sum(gains) / len(gains), 1) == average


@pytest.mark.parametrize("cell", CELLS)
def test_presets_are_the_papers_setup(cell: str) -> None:
    config = to_dict(preset(cell, "uq"))
    assert deviations(cell, config) == [] and not_preset(cell, config) == {}
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
        "FP8FedAvg-UQ", "82.0 ± 0.1", "60.0", "4.1×", "4.0×", "8.0×", "2 (1000)", "1", "100 B"
    ]  # fmt: skip
    assert list(table.rows[2])[5] == "–"  # UQ+ was not run
    assert any("clients.fraction 0.05 (paper: 0.1)" in note for note in table.notes)


def test_runs_of_other_settings_are_never_seeds_of_each_other(tmp_path: Path) -> None:
    """Two runs with the same seed used to become "74.2 ± 0.8, seeds 2"."""
    write_run(tmp_path, "fp32", 0, [0.7], 400)
    write_run(tmp_path, "dq", 0, [0.734], 20, name="k4", dq__kappa_up=4.0)
    write_run(tmp_path, "dq", 0, [0.75], 10, name="k16", dq__kappa_up=16.0)
    write_run(tmp_path, "dq", 1, [0.74], 10, name="k16-again", dq__kappa_up=16.0)
    rows = {row.label: row for row in compare(find_runs(tmp_path))}
    assert list(rows) == ["fp32", "dq:dq.kappa_up=16", "dq:dq.kappa_up=4"]
    assert rows["dq:dq.kappa_up=4"].seeds == [0] and rows["dq:dq.kappa_up=4"].accuracy.std is None
    assert rows["dq:dq.kappa_up=16"].seeds == [0, 1]
    assert rows["dq:dq.kappa_up=16"].gain is None  # there is no FP32 run of seed 1
    table = paper_table(TABLES["table1"], by_cell(find_runs(tmp_path)))
    names = [row[3] for row in table.rows[:6]]
    assert names[3:5] == ["FP8FedAvg-DQ (ours), dq.kappa_up=16", "FP8FedAvg-DQ (ours), dq.kappa_up=4"]
    commands = [row[-1] for table in docs_tables(by_cell(find_runs(tmp_path))) for row in table.rows if "dq" in row[1]]
    asked = [f"--methods fp32,dq:dq.kappa_up={k} " for k in (16, 4)]
    assert [text in command for text, command in zip(asked, commands, strict=True)] == [True, True]


def test_settings_that_do_not_touch_a_run_do_not_keep_seeds_apart(tmp_path: Path) -> None:
    """FP32 knows no kappa, and what is evaluated besides changes no model."""
    write_run(tmp_path, "fp32", 0, [0.7], 400, dq__kappa_down=0.3, round__eval_sent=False)
    write_run(tmp_path, "fp32", 1, [0.7], 400, wire__visits=1)
    config = tmp_path / "lenet-cifar10-iid/fp32-seed0/config.toml"  # of a version that had no tasks
    config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith("task")))
    (one,) = variants(find_runs(tmp_path))
    assert one.label == "fp32" and [run.seed for run in one.runs] == [0, 1]


def test_ranges_are_learned_where_a_version_knew_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path, "uq", 0, [0.7], 50)
    write_run(tmp_path, "uq", 1, [0.7], 50)
    config = tmp_path / "lenet-cifar10-iid/uq-seed0/config.toml"
    config.write_text("".join(line for line in config.read_text().splitlines(True) if not line.startswith("ranges ")))
    write_run(tmp_path, "uq", 0, [0.7], 50, name="largest", qat__ranges="largest")
    found = {v.label: [run.seed for run in v.runs] for v in variants(find_runs(tmp_path))}
    assert found == {"uq": [0, 1], "uq:qat.ranges=largest": [0]}


def test_variants_are_called_what_compare_called_their_folders(tmp_path: Path) -> None:
    write_run(tmp_path, "dq", 0, [0.7], 20)
    write_run(tmp_path, "dq", 0, [0.7], 10, name="dq:dq.kappa_up=16-seed0", dq__kappa_up=16.0)
    assert [v.label for v in variants(find_runs(tmp_path))] == ["dq", "dq:dq.kappa_up=16"]
    assert name_of("dq:dq.kappa_up=16:local.lr=1") == "FP8FedAvg-DQ (ours), dq.kappa_up=16, local.lr=1"
    assert name_of("uq:round.count=60") == "FP8FedAvg-UQ, 60 rounds"


def test_the_same_run_in_two_folders_and_runs_of_other_lengths_are_not_two_seeds(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "uq", 0, [0.4], 50)
    write_run(tmp_path / "b", "uq", 0, [0.5], 50)
    labels = [v.label for v in variants(find_runs(tmp_path))]
    assert labels == ["uq:a/lenet-cifar10-iid/uq-seed0", "uq:b/lenet-cifar10-iid/uq-seed0"]
    write_run(tmp_path / "c", "uq", 0, [0.4], 50)
    write_run(tmp_path / "c", "uq", 1, [0.4, 0.5], 50)
    assert [v.label for v in variants(find_runs(tmp_path / "c"))] == ["uq:round.count=1", "uq:round.count=2"]
    write_run(tmp_path / "c", "fp32", 0, [0.4], 200)
    write_run(tmp_path / "c", "fp32", 1, [0.4, 0.5], 200)
    gains = {row.label: row.gain and row.gain.mean for row in compare(find_runs(tmp_path / "c"))}
    assert gains["uq:round.count=1"] == gains["uq:round.count=2"] == 4.0  # each against the FP32 run of its length


def test_a_gain_is_measured_against_the_fp32_run_with_the_most_equal_settings(tmp_path: Path) -> None:
    write_run(tmp_path, "fp32", 0, [0.5, 0.6], 400, name="a", local__lr=0.1)
    write_run(tmp_path, "fp32", 0, [0.6, 0.6], 400, name="b", local__lr=0.5)
    write_run(tmp_path, "uq", 0, [0.6], 50, name="c", local__lr=0.5)
    write_run(tmp_path, "uq", 0, [0.6], 50, name="d", local__lr=0.1)
    gains = {row.label: row.gain.mean for row in compare(find_runs(tmp_path)) if row.gain}
    assert gains["uq:local.lr=0.5"] == 400 / 50 and gains["uq:local.lr=0.1"] == 800 / 50


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_report_writes_only_inside_its_folder(tmp_path: Path) -> None:
    path = write_run(tmp_path, "dq", 0, [0.4], 50, name="k4")
    write_run(tmp_path, "dq", 0, [0.4], 50, name="k8", dq__kappa_up=2.0)
    before = files(tmp_path)
    write_report(path)
    inside = f"{path.relative_to(tmp_path)}/"
    new = files(tmp_path) - before
    assert f"{inside}report.html" in new and f"{inside}compare.png" in new
    assert all(name.startswith(inside) for name in new)


def test_no_gain_where_either_side_is_at_chance(tmp_path: Path) -> None:
    # CIFAR-10, 10,000 test images: p = 0.1, 5 s = 0.015, so the bound is 1.5 p = 0.15
    write_run(tmp_path / "a", "fp32", 0, [0.12, 0.149], 400, sizes=100)
    write_run(tmp_path / "a", "uq", 0, [0.3], 50, sizes=25)
    fp32, uq = compare(find_runs(tmp_path / "a"))
    assert not fp32.learned and uq.learned and not uq.comparable and uq.gain is None and uq.gain_raw is None
    comparison = write_comparison(tmp_path / "a", find_runs(tmp_path / "a"))
    assert "×" not in comparison.text() and comparison.text().count(NOT_LEARNED) == 4
    assert gains_of(curves_of(find_runs(tmp_path / "a"))) == {}
    write_run(tmp_path / "b", "fp32", 0, [0.12, 0.151], 400)
    write_run(tmp_path / "b", "uq", 0, [0.3], 50)
    assert all(row.learned and row.gain for row in compare(find_runs(tmp_path / "b")))
    # CIFAR-100 on 1,000 images: p + 5 s = 0.0257
    for name, accuracy in (("c", 0.025), ("d", 0.026)):
        write_run(tmp_path / name, "uq", 0, [accuracy], 5, cell="resnet18-cifar100-iid", data__test_limit=1000)
    runs = [run for name in "cd" for run in find_runs(tmp_path / name)]
    assert [run.best > run.chance for run in runs] == [False, True]


def test_a_run_below_its_untrained_model_has_not_learned(tmp_path: Path) -> None:
    path = write_run(tmp_path, "uq", 0, [0.4], 5)
    history = (path / "history.jsonl").read_text().replace('"accuracy": 0.1', '"accuracy": 0.5')
    (path / "history.jsonl").write_text(history)
    assert not read_run(path).learned


def test_the_known_test_sets_are_those_of_the_data_sets() -> None:
    from fedfp8.data.spec import SPECS

    assert set(TEST_SETS) == set(SPECS)
    for name, (classes, examples) in TEST_SETS.items():
        if name != "speech_commands":  # as found
            assert classes == len(SPECS[name].classes)
            assert examples == min(test for _, test in SPECS[name].counts)


def test_smoke_checks_are_listed_apart(tmp_path: Path) -> None:
    write_run(tmp_path, "fp32", 0, [0.6, 0.7], 400, sizes=100)
    write_run(tmp_path, "uq", 0, [0.6, 0.7], 50, sizes=25)
    for method in ("fp32", "uq"):
        write_run(tmp_path, method, 0, [0.11], 50, cell="resnet18-cifar10-iid")
    groups = by_cell(find_runs(tmp_path))
    results, smoke = docs_tables(groups)
    assert [row[0] for row in smoke.rows] == ["resnet18-cifar10-iid"] * 2
    assert not any(row[0] == "resnet18-cifar10-iid" and "not run yet" not in row[3] for row in results.rows)
    assert "11.0 / not learned yet" in smoke.markdown()
    table = paper_table(TABLES["table1"], groups)
    assert any(
        "Smoke checks" in note and "resnet18-cifar10-iid uq (11.0 % after 1 rounds)" in note for note in table.notes
    )
    report = write_report(tmp_path)
    text = report.path.read_text()
    assert text.index("<h2>lenet-cifar10-iid</h2>") < text.index("<h2>Smoke check: resnet18-cifar10-iid</h2>")
    assert "Not drawn, because they have not learned yet: resnet18-cifar10-iid." in text
    assert report.headline.startswith("lenet-cifar10-iid: FP8FedAvg-UQ needed 8.0 times fewer bytes than FP32 to reach")


def test_another_metric_where_lower_is_better(tmp_path: Path) -> None:
    def with_metric(values: list[float], per_round: int) -> list[dict[str, Any]]:
        found = lines([None] * len(values), per_round)
        for line, value in zip(found, [9.0, *values], strict=True):
            line.pop("accuracy", None)
            line["metric"] = {"name": "rmse", "value": value, "higher_is_better": False}
        return found

    rmse = Metric("rmse", higher_is_better=False)
    gain = gain_between(points_of(with_metric([3, 2, 1], 100)), points_of(with_metric([4, 2, 2], 10)), rmse)
    assert gain is not None and gain.value == 2 and gain.gain == 200 / 20
    for method, values, size in (("fp32", [3.0, 2.0, 1.0], 100), ("uq", [4.0, 2.0, 2.0], 10)):
        path = write_run(tmp_path, method, 0, [0.5] * 3, size)
        (path / "history.jsonl").write_text("".join(json.dumps(x) + "\n" for x in with_metric(values, size)))
    comparison = write_comparison(tmp_path, find_runs(tmp_path))
    assert comparison.table.header[1] == "rmse" and comparison.table.rows[1][1] == "2.0000"
    assert comparison.table.rows[1][7] == "10.0×" and comparison.rows[0].accuracy_best.mean == 1.0
    assert "reach 2 rmse" in write_report(tmp_path).headline


def test_gains_are_listed_and_an_arrow_shows_the_largest_where_it_was_measured(tmp_path: Path) -> None:
    from matplotlib.text import Annotation

    ends = {"fp32": 6e7, "bq": 5e6, "uq": 5.2e6, "uq+": 5.3e6, "dq": 1.9e6}
    curves = [Curve(m, [end / 2, end], [0.9, 0.99]) for m, end in ends.items()]
    _, panels = new_figure(3.5, 3)
    axes = panels[0, 0]
    draw_curves(axes, curves, gains_of(curves))
    (arrow,) = [t for t in axes.texts if isinstance(t, Annotation)]
    assert arrow.xy == (1.9, 99) and arrow.xyann == (60, 99)  # MB, percent
    texts = [t.get_text() for t in axes.get_legend().get_texts()]
    assert texts == ["31.6×", "12.0×", "11.5×", "11.3×"]
    assert max(axes.get_yticks()) <= 100 and axes.get_ylim()[1] < 103
    assert [p.suffix for p in accuracy_against_bytes(curves, tmp_path / "x")] == [".png", ".pdf"]


def test_a_long_legend_makes_a_picture_taller_and_not_its_panel_smaller(tmp_path: Path) -> None:
    def height(variants: int) -> int:
        curves = [Curve(f"dq:dq.kappa_up={i}", [1e6, 2e6], [0.4, 0.5]) for i in range(variants)]
        png, _ = accuracy_against_bytes(curves, tmp_path / f"{variants}")
        return int.from_bytes(png.read_bytes()[20:24], "big")  # PNG keeps its height there

    assert height(10) > height(2) + 7 * 0.12 * 220  # lines of 7 points at 220 dots an inch


@pytest.mark.parametrize(("least", "most"), [*((10.0**n, 1.9e10) for n in range(4, 9)), (1e6, 1e9)])
def test_labels_of_a_logarithmic_axis_do_not_meet(least: float, most: float) -> None:
    """Whatever the range of bytes is, in a panel of Figure 4 with three of them in a row: half a digit apart."""
    figure, panels = new_figure(7.16, 2.7, 1, 3)
    axes = panels[0, 0]
    draw_curves(axes, [Curve("fp32", [most / 60, most], [0.4, 0.8]), Curve("dq", [least, most / 60], [0.4, 0.8])], {})
    figure.draw_without_rendering()
    low, high = axes.get_xlim()
    shown = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
    boxes = sorted((box.x0, box.x1) for box in (label.get_window_extent() for label in shown))
    assert len(boxes) >= 3 and all(end + 4 < begin for (_, end), (begin, _) in pairwise(boxes))


def test_plots_have_the_rows_gain_with_its_spread_and_legends_name_smoke_checks(tmp_path: Path) -> None:
    for seed, size in ((0, 50), (1, 100)):
        write_run(tmp_path, "fp32", seed, [0.4, 0.6], 400)
        write_run(tmp_path, "uq", seed, [0.4, 0.6], size)
        write_run(tmp_path, "bq", seed, [0.1, 0.1], size)
    runs = find_runs(tmp_path)
    row = next(row for row in compare(runs) if row.method == "uq")
    curves = curves_of(runs)
    gains = gains_of(curves, compare(runs))
    assert gains.keys() == {"uq"} and (gains["uq"].gain, gains["uq"].std) == (row.gain.mean, row.gain.std) == (
        6,
        8**0.5,
    )
    _, panels = new_figure(3.5, 3)
    draw_curves(panels[0, 0], curves, gains)
    assert [t.get_text() for t in panels[0, 0].get_legend().get_texts()] == ["6.0 ± 2.8×"]
    labels = panels[0, 0].get_legend_handles_labels()[1]
    assert [label for label in labels if NOT_LEARNED in label] == ["FP8FedAvg-BQ (not learned yet)"]


def test_a_legend_of_many_methods_fits_the_figure() -> None:
    figure, panels = new_figure(7, 3)
    for i in range(11):
        panels[0, 0].plot([0, 1], [0, i], label=f"FP8FedAvg-DQ (ours), round.count={i}")
    add_legend(figure, columns=5)
    (legend,) = figure.legends
    assert legend.get_window_extent().width <= figure.bbox.width and len(legend.get_texts()) == 11


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
    (table,) = docs_tables(groups)
    assert len(table.rows) == 36
    page.write_text("no markers")
    with pytest.raises(ConfigError, match="records:begin"):
        update_docs(page, groups)


def test_tables_of_curves_have_means_over_seeds_beside_fp32(tmp_path: Path) -> None:
    """Second half of four rounds: 2, 3 and 4. Every client's message has the same bytes, a tenth of FP32's for DQ."""
    for seed, low in ((0, 0.0), (1, 0.02)):
        write_run(tmp_path, "fp32", seed, [0.2, 0.4, 0.5, 0.6], 400)
        write_run(tmp_path, "dq", seed, [0.2, 0.4 + low, 0.5 + low, 0.6 + low], 40)
    write_run(tmp_path, "uq", 0, [0.1, 0.1, 0.1, 0.1], 100)  # has learned nothing: not a row
    table = curve_table(find_runs(tmp_path), [1, 4, 9])
    assert list(table.header[:6]) == ["", "seeds", "1", "4", "9", "second half"]
    fp32, dq = table.rows
    assert fp32[:7] == ["FP32 FedAvg", "0, 1", "20.0", "60.0", "", "50.0 ± 0.0", "–"]
    assert dq[:7] == ["**FP8FedAvg-DQ (ours)**", "0, 1", "20.0", "61.0", "", "51.0 ± 1.4", "+1.0 ± 1.4"]
    assert dq[7:10] == ["3.2 / 3.2", "10.0×", "10.0 ± 0.0×"]


def test_a_run_is_compared_with_fp32_over_the_rounds_that_both_have(tmp_path: Path) -> None:
    write_run(tmp_path, "fp32", 0, [0.2, 0.4, 0.5, 0.6], 400)
    write_run(tmp_path, "dq", 0, [0.2, 0.5], 40)
    dq = curve_table(find_runs(tmp_path), [2]).rows[-1]
    assert dq[3:6] == ["35.0", "+5.0", "3.2 / 3.2"] and dq[6] == "10.0×"


def test_a_page_gets_the_curves_that_it_asks_for(tmp_path: Path) -> None:
    write_run(tmp_path, "fp32", 0, [0.2, 0.4], 400)
    text = "a\n<!-- curves lenet-cifar10-iid 1 2 -->\nold\n<!-- curves:end -->\nb <!-- curves:end -->\n"
    groups = by_cell(find_runs(tmp_path))
    found = refreshed(text, groups)
    assert "| FP32 FedAvg | 0 | 20.0 | 40.0 |" in found and "old" not in found
    assert found.startswith("a\n") and found.endswith("b <!-- curves:end -->\n") and refreshed(found, groups) == found


def test_a_longer_run_stands_for_a_method_once_it_has_got_farther(tmp_path: Path) -> None:
    write_run(tmp_path, "uq", 0, [0.2, 0.4], 50)
    path = write_run(tmp_path, "uq", 1, [0.2, 0.4, 0.5, 0.6], 50)
    assert [run.seed for run in longest(find_runs(tmp_path))] == [1]
    history = path / "history.jsonl"
    history.write_text("".join(history.read_text().splitlines(True)[:2]))  # of four rounds only one is done
    assert [run.seed for run in longest(find_runs(tmp_path))] == [0]


def test_the_summary_has_the_longest_runs_of_cells_that_have_learned(tmp_path: Path) -> None:
    write_run(tmp_path, "fp32", 0, [0.2, 0.4, 0.5], 400)
    write_run(tmp_path, "fp32", 1, [0.2, 0.8], 400)  # shorter, so not a second seed
    write_run(tmp_path, "bq", 0, [0.2, 0.4], 100)
    write_run(tmp_path, "uq", 0, [0.2, 0.42], 100)
    write_run(tmp_path, "dq", 0, [0.2, 0.38, 0.48], 40)
    write_run(tmp_path, "dq", 0, [0.2, 0.6, 0.7], 40, name="dq:dq.kappa_up=16-seed0", dq__kappa_up=16.0)
    for method in ("fp32", "uq"):
        write_run(tmp_path, method, 0, [0.1, 0.1], 100, cell="resnet18-cifar10-iid")
    write_run(tmp_path, "fp32", 0, [0.2, 0.4], 400, cell="lenet-cifar10-dir")
    text = refreshed("<!-- summary:begin -->\nold\n<!-- summary:end -->\n", by_cell(find_runs(tmp_path)))
    assert text.count("\n| ") == 3 and "old" not in text
    assert "| lenet-cifar10-iid | 3 (UQ 2) | 1 | 50.0 % | +1.0 | 6.0× | -2.0 | 10.0× |" in text
    assert "| lenet-cifar10-iid, dq.kappa_up=16 | 3 | 1 | 50.0 % | – | – | +20.0 | 15.0× |" in text


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/reproduce.md"])
def test_the_docs_show_the_records(page: str) -> None:
    """`fedfp8 report results --docs PAGE` would change nothing."""
    root = Path(__file__).parents[1]
    text = (root / page).read_text()
    assert "<!-- " in text and refreshed(text, paper_runs(root / "results")) == text


def test_the_command_of_every_record_asks_for_its_very_settings(tmp_path: Path) -> None:
    """ResNet18's commands left out `model.stem`, on which the paper is silent: they trained another network."""
    groups = paper_runs(Path(__file__).parents[1] / "results")
    asked: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in (row for table in docs_tables(groups) for row in table.rows if row[3] != "not run yet"):
        _, _, experiment, *options = shlex.split(row[-1].strip("`"))
        given = list(zip(options[::2], options[1::2], strict=True))
        one = dict(given)
        jobs = plan(
            experiment, tmp_path, only=[one["--only"]], methods=one["--methods"].split(","),
            rounds=int(one["--rounds"]), seeds=[int(seed) for seed in one["--seeds"].split(",")],
            settings=dict(parse_assignment(value) for option, value in given if option == "--set"),
        )  # fmt: skip
        for job in jobs:
            record = RunRecord(tmp_path, to_dict(job.config), [], {}, {}, {})
            asked.setdefault((record.cell, record.method, record.seed), []).append(record.settings)
    records = [run for runs in groups.values() for run in runs]
    assert records
    assert [run.path.name for run in records if run.settings not in asked[run.cell, run.method, run.seed]] == []


def test_how_numbers_are_written() -> None:
    assert [size_text(v) for v in (12, 999_600, 1_280_000_000)] == ["12 B", "1 MB", "1.28 GB"]
    assert [duration_text(v) for v in (5, 600, 7200, 8 * 86400)] == ["5 s", "10 min", "2.0 h", "8.0 days"]
    assert Table("", ["a", "b"], [["x|y", "1"]]).markdown() == "| a | b |\n|---|---|\n| x\\|y | 1 |\n"
    assert "&lt;b&gt;" in Table("", ["a"], [["<b>"]]).html()
