"""What a running plan shows, in 80 columns and without a terminal."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedfp8.cli.display import BAR, Display, fitted
from fedfp8.fl import preset
from fedfp8.paper.jobs import Job
from fedfp8.paper.reproduce import Clock


def jobs(*methods: str, seeds: tuple[int, ...] = (0,), rounds: int = 1000) -> list[Job]:
    return [Job(preset("digits", m, seed=s, round__count=rounds), Path(f"{m}-{s}")) for s in seeds for m in methods]


def line(round: int, **more: Any) -> dict[str, Any]:
    return {
        "round": round, "accuracy": 0.987, "bytes_down": 123_456_789, "bytes_up": 98_765_432,
        "bytes_total": 1_234_567_890, "rejected": [], "notes": [], "seconds": {"total": 3.0},
    } | more  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_method_round_accuracy_and_time_left_fit_and_bytes_go_first(width: int, seeds: tuple[int, ...]) -> None:
    plan = jobs("fp32", "bq", "uq", "uq+", "qat-stochastic", seeds=seeds)
    out = io.StringIO()
    size = {"width": width, "height": 40}  # both, or rich takes 80 columns where TERM is "dumb"
    console = Console(file=out, **size, force_terminal=True, color_system=None, legacy_windows=False)
    with Display(Clock(dict.fromkeys(plan, 1.0)), console=console) as display:
        for r in (998, 999):
            display.round(plan[-1], line(r))
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n")
    shown = [text for text in plain.split("\n") if "999" in text][-1]
    label = f"{len(plan)}/{len(plan)} qat-stochastic" + (" seed 2" if len(seeds) > 1 else "")
    for part in (label, "999/1000", "accuracy 98.7 %", " h left"):
        assert part in shown, shown
    assert ("sent" in shown) == (width >= 100)
    assert len(shown.rstrip()) <= width


def test_a_long_label_is_shortened_and_nothing_else() -> None:
    parts = ["dq:" + "x" * 90, "round 3/40", "accuracy 98.7 %", "12 min left", "1.2 GB sent"]
    text = fitted(parts, 80 - BAR - 2)
    assert len(text) == 80 - BAR - 2 and text.startswith("dq:xxx") and all(part in text for part in parts[1:4])


def test_time_left_is_of_the_whole_plan(capsys) -> None:
    plan = jobs("fp32", "uq", rounds=10)
    with Display(Clock(dict.fromkeys(plan, 1.0)), console=Console(file=io.StringIO())) as display:
        for r in range(3):
            display.round(plan[0], line(r))
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"1/2 fp32  round {r}/10  accuracy 98.7 %  1.23 GB sent" for r in (0, 1)]
    assert said[2].startswith("1/2 fp32  round 2/10  accuracy 98.7 %  54 s left")  # 18 rounds of 3 seconds


def test_quiet_plans_say_the_last_round_of_every_run(capsys) -> None:
    (job,) = jobs("uq", rounds=5)
    with Display(Clock({job: 1.0}), quiet=3600.0, console=Console(file=io.StringIO())) as display:
        for r in range(6):
            display.round(job, line(r))
    assert [text.split()[2] for text in capsys.readouterr().out.splitlines()] == ["0/5", "5/5"]


def test_problems_go_to_standard_error_and_other_metrics_are_named(capsys) -> None:
    (job,) = jobs("uq", rounds=5)
    spoiled = line(1, rejected=[{"client": 3, "reason": "NaN in 0.weight"}], notes=["a worker died"])
    spoiled["metric"] = {"name": "rmse", "value": 0.12345, "higher_is_better": False}
    with Display(Clock({job: 1.0}), console=Console(file=io.StringIO())) as display:
        display.round(job, spoiled)
    out, err = capsys.readouterr()
    assert "rmse 0.1235" in out or "rmse 0.1234" in out
    assert err.splitlines() == ["uq, round 1: client 3 rejected: NaN in 0.weight", "uq, round 1: a worker died"]


def test_json_is_the_record_with_the_name_of_the_run(capsys) -> None:
    (job,) = jobs("uq", rounds=5)
    with Display(Clock({job: 1.0}), as_json=True) as display:
        display.round(job, line(1, notes=["a worker died"]))
        display.say("for people")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"run": "digits uq seed 0", **line(1, notes=["a worker died"])} and err == ""
