"""`fedfp8 reproduce` end to end on the digits preset, in place of a cell of the paper."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedfp8 import fl
from fedfp8.errors import ConfigError, RunError
from fedfp8.fl.config import cohort_size
from fedfp8.fl.federation import build
from fedfp8.fl.simulate import sample
from fedfp8.paper import paper
from fedfp8.paper.estimate import round_seconds
from fedfp8.paper.jobs import Job, plan
from fedfp8.paper.paper import Cell, PaperTable, Reported
from fedfp8.paper.records import read_run
from fedfp8.paper.reproduce import Clock, plan_table, run_jobs
from fedfp8.paper.sizes import measure_missing, measure_sizes

SMALL = {
    "data.limit": 200,
    "clients.count": 4,
    "clients.fraction": 0.5,
    "local.epochs": 1,
    "local.batch_size": 50,
    "data.partition": "iid",
}
NUMBERS = {"digits": {"fp32": Reported(90.0, 1.0, 1.0), "uq": Reported(89.0, 1.0, 4.0)}}


@pytest.fixture(autouse=True)
def digits_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(paper.CELLS, "digits", Cell("digits", "CNN", "digits", "i.i.d."))
    monkeypatch.setitem(paper.TABLES, "table1", PaperTable("table1", "Table 1", ("fp32", "uq"), NUMBERS))


def planned(out: Path, rounds: int = 2, **options: Any) -> list[Job]:
    return plan("table1", out, rounds=rounds, settings={**SMALL, **options.pop("settings", {})}, **options)


def test_runs_skips_resumes_and_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    jobs = planned(tmp_path)
    assert [job.status for job in jobs] == ["new", "new"]
    assert run_jobs(
        "table1", jobs, tmp_path, workers=0, on_round=lambda job: lambda line: seen.append((job.name, line["round"]))
    )
    assert [r for name, r in seen if name == "digits uq seed 0"] == [0, 1, 2]
    content = json.loads((tmp_path / "table1.json").read_text())["cells"]["digits"]
    recorded = read_run(tmp_path / "digits" / "uq-seed0")
    assert content["ours"]["uq"]["accuracy"]["mean"] == recorded.accuracy
    assert content["ours"]["uq"]["bytes"]["mean"] == recorded.bytes_total and content["paper"]["uq"]["accuracy"] == 89.0
    assert "| CNN | digits | i.i.d. | FP8FedAvg-UQ | 89.0 ± 1.0 |" in (tmp_path / "table1.md").read_text()
    for name in ("table1.csv", "report.html", "digits/compare.json"):
        assert (tmp_path / name).stat().st_size > 0

    def must_not_run(*_: object, **__: object) -> None:
        raise AssertionError("a finished run was run again")

    with monkeypatch.context() as patched:
        patched.setattr(fl, "run", must_not_run)
        patched.setattr(fl, "resume", must_not_run)
        again = planned(tmp_path)
        assert [job.status for job in again] == ["done", "done"]
        assert run_jobs("table1", again, tmp_path, workers=0)

    # a longer run continues the shorter one, to the same bytes as a run that was never interrupted
    longer = planned(tmp_path, 3, methods=["uq"])
    assert [(job.status, job.done) for job in longer] == [("begun", 2)]
    assert run_jobs("table1", longer, tmp_path, workers=0)
    whole = fl.run(longer[0].config, out=tmp_path / "whole", workers=0)
    continued = read_run(tmp_path / "digits" / "uq-seed0").history
    keys = ("round", "model", "digest_down", "digest_up", "bytes_total", "accuracy")
    assert [[line[k] for k in keys] for line in continued] == [[line[k] for k in keys] for line in whole.rounds]


def test_a_method_with_settings_of_its_own_has_its_own_folder_and_row(tmp_path: Path) -> None:
    jobs = planned(tmp_path, 1, methods=["uq", "uq:qat.ranges=largest"])
    assert [(j.name, j.config.qat.ranges) for j in jobs] == [
        ("digits uq seed 0", "learned"), ("digits uq:qat.ranges=largest seed 0", "largest"),
    ]  # fmt: skip
    run_jobs("table1", jobs, tmp_path, workers=0)
    assert [job.status for job in planned(tmp_path, 1, methods=["uq:qat.ranges=largest"])] == ["done"]
    rows = json.loads((tmp_path / "digits" / "compare.json").read_text())
    assert "uq:qat.ranges=largest" in str(rows) and (tmp_path / "digits" / "uq:qat.ranges=largest-seed0").is_dir()
    with pytest.raises(ConfigError, match="unknown method 'uw'"):
        planned(tmp_path, 1, methods=["uw:qat.ranges=largest"])
    with pytest.raises(ConfigError, match=r"qat\.range"):
        planned(tmp_path, 1, methods=["uq:qat.range=largest"])


def test_other_settings_unknown_cells_and_methods_are_refused(tmp_path: Path) -> None:
    run_jobs("table1", planned(tmp_path, 1, methods=["fp32"]), tmp_path, workers=0)
    with pytest.raises(ConfigError, match=r"local\.lr is 0\.1 there and 0\.5 asked for"):
        planned(tmp_path, 1, methods=["fp32"], settings={"local.lr": 0.5})
    with pytest.raises(ConfigError, match=r"unknown cell 'lenet'; choose from digits"):
        planned(tmp_path, only=["lenet"])
    with pytest.raises(ConfigError, match=r"unknown method 'int8'"):
        planned(tmp_path, methods=["int8"])


@pytest.mark.parametrize("method", ["fp32", "bq", "uq", "uq+", "qat-nearest"])
def test_raw_sizes_are_those_of_a_run_without_the_lossless_stage(tmp_path: Path, method: str) -> None:
    """Measured on one model, exact for every message of a run."""
    config = fl.preset("digits", method, round__count=2, wire__lossless=False)
    fl.run(fl.with_settings(config, SMALL), out=tmp_path, workers=0)
    sizes = measure_sizes(tmp_path)
    for line in read_run(tmp_path).history[1:]:
        assert line["bytes_down"] == len(line["clients"]) * sizes["down_raw"]
        assert line["bytes_up"] == len(line["clients"]) * sizes["up_raw"]
    assert measure_missing(tmp_path) == []
    (tmp_path / "sizes.json").unlink()
    assert measure_missing(tmp_path) == [tmp_path]
    raw, sent = read_run(tmp_path).raw_points, read_run(tmp_path).points
    assert raw == sent


def test_no_raw_size_where_it_is_not_one_number(tmp_path: Path) -> None:
    fl.run(fl.with_settings(fl.preset("digits", "dq", round__count=1), SMALL), out=tmp_path, workers=0)
    assert "reason" in measure_sizes(tmp_path)
    assert read_run(tmp_path).raw_points == []
    with pytest.raises(RunError, match="no checkpoint"):
        measure_sizes(tmp_path / "checkpoint")


def test_estimate_counts_steps_and_test_pieces(tmp_path: Path) -> None:
    (job,) = planned(tmp_path, methods=["uq"])
    federation = build(job.config)
    # 2 of 4 clients with 50 examples: one step each; 360 test examples: one piece, evaluated for the server's model and
    # for the one sent, every round
    assert round_seconds(job.config, federation, 1.0, 0.25, workers=1) == 2 * 1.0 + 2 * 0.25
    assert round_seconds(job.config, federation, 1.0, 0.25, workers=8) == 1.0 + 2 * 0.25 / 8
    table = plan_table([job], 1)
    assert list(table.rows[0])[:5] == ["digits", "uq", "0", "new", "0/2"] and "hours" in table.notes[0]


def test_a_cohort_has_the_same_size_in_the_estimate_and_in_the_run(tmp_path: Path) -> None:
    """0.1 x 25 is 2.5: one of them said 2, the other 3."""
    settings = {"clients.count": 25, "clients.fraction": 0.1, "data.limit": 500, "clients.min_examples": 1}
    (job,) = planned(tmp_path, methods=["uq"], settings=settings)
    federation = build(job.config)
    cohort = sample(job.config, federation.eligible(job.config), 1)
    assert len(cohort) == cohort_size(job.config, 25) == 3
    assert round_seconds(job.config, federation, 1.0, 0.0, workers=1) == len(cohort) * 1.0  # a step each
    assert [cohort_size(job.config, n) for n in (1, 4, 5, 14, 15)] == [1, 1, 1, 1, 2]


def test_time_left_is_corrected_by_what_rounds_really_take(tmp_path: Path) -> None:
    first, second = planned(tmp_path, 10)
    clock = Clock({first: 1.0, second: 3.0})
    assert clock.total == clock.left == 40
    for r, seconds in enumerate([9.0, 60.0, 2.0]):  # round 0 only evaluates, round 1 starts the workers, too
        clock.round(first, {"round": r, "seconds": {"total": seconds}})
    assert clock.left == 2 * (8 * 1.0 + 10 * 3.0)
