"""`fedfp8 report` in a process that cannot import torch."""

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from fedfp8.errors import RunError
from fedfp8.paper.figures import draw_figure4
from fedfp8.paper.report import write_report
from test_paper_records import write_run

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numba", "safetensors"):
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Refuse())
sys.argv = ["fedfp8", *sys.argv[1:]]
from fedfp8.cli import main
main()
"""


def fedfp8(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_report_needs_no_torch_and_no_network(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs, "fp32", 0, [0.4, 0.6], 400, sizes=100)
    write_run(runs, "uq", 0, [0.4, 0.6], 50, sizes=25)
    page = tmp_path / "page.md"
    page.write_text("<!-- records:begin -->\n<!-- records:end -->\n")
    other = tmp_path / "other.md"
    other.write_text("<!-- summary:begin -->\n<!-- summary:end -->\n")
    result = fedfp8("report", str(runs), "--docs", str(page), "--docs", str(other), "--keep", str(tmp_path / "kept"))
    assert result.returncode == 0, result.stderr
    text = (runs / "report.html").read_text()
    sources = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s)>]{1,30})""", text)
    assert sources and all(source.startswith(("data:image/png;base64,", "data:,")) for source in sources)
    assert "https://" not in text and text.count("http://") == text.count("http://www.w3.org/2000/svg") == 1
    for wanted in (
        "lenet-cifar10-iid",
        "8.0×",
        "82.0 ± 0.1",
        "2 of 2 rounds",
        "needed 8.0 times fewer bytes",
        "round.count 2 (paper: 1000)",
    ):
        assert wanted in text
    for name in ("table1.md", "table1.csv", "table1.json", "figure4.pdf", "lenet-cifar10-iid/compare.png"):
        assert (runs / name).exists()
    assert "60.0 / 4.0× raw, 8.0× sent" in page.read_text() and "| +0.0 | 8.0× |" in other.read_text()
    kept = tmp_path / "kept" / "lenet-cifar10-iid" / "uq-seed0"
    assert sorted(file.name for file in kept.iterdir()) == ["config.toml", "history.jsonl", "sizes.json"]


def test_figure_4_has_a_curve_a_method_and_no_panel_without_curves(tmp_path: Path) -> None:
    """Its longest runs stand for a method, in the headline, too; one evaluation is a point."""
    for seed, values in enumerate(([0.4, 0.5, 0.6], [0.4, 0.5])):
        write_run(tmp_path, "fp32", seed, values, 400)
        write_run(tmp_path, "uq", seed, values, 50)
    write_run(tmp_path, "dq", 0, [0.4], 100)
    write_run(tmp_path, "qat-nearest", 0, [0.4, 0.5], 400)
    for method in ("fp32", "uq"):
        write_run(tmp_path, method, 0, [0.4], 400, cell="lenet-cifar10-dir")
        write_run(tmp_path, method, 0, [0.4, 0.5], 400, cell="kwt1-speech-speaker")
    with patch("fedfp8.paper.report.draw_figure4", wraps=draw_figure4) as drawn:
        report = write_report(tmp_path)
    assert "FP8FedAvg-UQ needed 8.0 times fewer bytes than FP32 to reach 60.0 % accuracy" in report.headline
    ((cells, _),) = (call.args for call in drawn.call_args_list)
    assert [(cell, [(r.method, r.seed) for r in runs]) for cell, runs in cells.items()] == [
        ("lenet-cifar10-iid", [("fp32", 0), ("uq", 0)]),  # in the paper's order
        ("kwt1-speech-speaker", [("fp32", 0), ("uq", 0)]),
    ]
    assert "they were evaluated only once or ran only methods of Table 2: lenet-cifar10-dir." in report.path.read_text()


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no records"):
        write_report(tmp_path)
    result = fedfp8("report", str(tmp_path / "missing"))
    assert result.returncode == 1 and "is not a folder" in result.stderr and "Traceback" not in result.stderr
    for command in (["report", str(tmp_path)], ["bench"]):
        result = fedfp8(*command, "--docs", str(tmp_path / "none.md"))
        assert result.returncode and "Invalid value for '--docs'" in result.stderr and "Traceback" not in result.stderr
