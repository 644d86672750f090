"""The same verdict everywhere: nothing of the user's environment reaches a test, and no test leaves anything behind.

HOME and all caches are a folder of this session, proxies, terminal settings and our own variables are gone, and torch's
number of threads is put back after every test. OMP_NUM_THREADS stays: the suite passes with any (`make test-threads`).

Property tests draw the same examples in every run, so that a green suite stays green; `make test-slow` searches on:
HYPOTHESIS_PROFILE=search draws ten times as many, new ones every time.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("fast", derandomize=True, max_examples=200, deadline=None)
settings.register_profile("search", derandomize=False, max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

FOREIGN = re.compile(
    r"(?i)(.*_proxy|columns|lines|no_color|force_color|clicolor.*|py_colors|tty_.*|pythonwarnings|mplbackend|mplconfigdir"
    r"|xdg_.*|hf_.*|flwr_.*|ray_.*|fedfp8_cache)"
)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers inherit what their controller set up
        config.home = tempfile.mkdtemp(prefix="fedfp8-home-")  # type: ignore[attr-defined]
        config.option.data_dir = config.option.data_dir or os.environ.pop("FEDFP8_DATA", None)
        for name in [name for name in os.environ if FOREIGN.fullmatch(name)]:
            del os.environ[name]
        os.environ |= {"HOME": config.home, "TERM": "dumb"}  # type: ignore[attr-defined]


def pytest_unconfigure(config: pytest.Config) -> None:
    if home := getattr(config, "home", None):
        shutil.rmtree(home, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data-dir", help="folder of real data sets for tests/test_data_real.py")


@pytest.fixture(scope="session")
def data_root(request: pytest.FixtureRequest) -> Path:
    """Real data sets: --data-dir, $FEDFP8_DATA, or ../shared/data beside the repository where that exists."""
    root = Path(request.config.option.data_dir or Path(__file__).parents[2] / "shared" / "data")
    if not root.is_dir():
        pytest.skip(f"no real data sets in {root}; say where they are with --data-dir or FEDFP8_DATA")
    return root


@pytest.fixture
def fedfp8_command(monkeypatch, capsys):
    """Runs the command in this process: (exit code, standard output, standard error)."""
    from fedfp8 import cli

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedfp8", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(autouse=True)
def same_number_of_threads() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
