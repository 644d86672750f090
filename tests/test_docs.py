"""The documentation is true: commands parse and print what the tutorial shows, links lead somewhere, code compiles."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def code_lines(text: str) -> Iterator[str]:
    """Commands in fenced and indented blocks, continued lines joined; of console blocks what follows the prompt."""
    blocks = [block for language, block in FENCE.findall(text) if language in ("", "sh")]
    blocks += ["".join(re.findall(r"^\$ (.*\n)", block, re.M)) for language, block in FENCE.findall(text)]
    blocks += re.findall(r"(?:^    [^\n]*\n)+", FENCE.sub("", text), re.M)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip()


# Links and code


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", FENCE.sub("", text_of(page)))
    missing = [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]
    generated = {"reference/errors.md", "reference/settings.md", "reference/cli.md", "reference/api.md"}
    assert not set(missing) - generated, f"{page} links to {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_compile(page: str) -> None:
    for language, block in FENCE.findall(text_of(page)):
        if language == "python":
            entry = block.startswith('"') and block.rstrip().endswith(",")  # a line of a dict
            compile(f"{{{block}}}" if entry else block, page, "exec")


def test_every_page_is_in_the_navigation() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with mkdocs")
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def leaves(item: Any) -> Iterator[str]:
        if isinstance(item, str):
            yield item
        else:
            for child in item if isinstance(item, list) else item.values():
                yield from leaves(child)

    named = set(leaves(site["nav"]))
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    generated = {"changelog.md", "contributing.md"} | {n for n in named if n.startswith("reference/")}
    assert pages == named - generated


def test_the_site_loads_nothing_from_elsewhere() -> None:
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()
    for picture in (ROOT / "docs/figures").glob("*.svg"):
        assert not re.search(r'(?:href|src)="https?:', picture.read_text()), picture


# Commands


@pytest.fixture(scope="module")
def command() -> Any:
    from typer.main import get_command

    from fedfp8.cli import app, commands

    commands.register(app)
    return get_command(app)


@pytest.mark.parametrize("page", PAGES)
def test_every_fedfp8_command_parses(page: str, command: Any) -> None:
    inline = re.findall(r"`(fedfp8 [a-z][^`]* --[^`]*)`", FENCE.sub("", text_of(page)))
    for line in [*code_lines(text_of(page)), *inline]:
        if not re.match(r"fedfp8 [a-z]", line):
            continue
        words = shlex.split(re.sub(r"\bN\b", "1", line), comments=True)[1:]
        found = command
        while hasattr(found, "commands"):
            assert words and words[0] in found.commands, f"{page}: {line}"
            found = found.commands[words.pop(0)]
        try:
            found.make_context("fedfp8", [w for w in words if w != "..."])
        except Exception as error:
            pytest.fail(f"{page}: {line}\n{getattr(error, 'message', error)}")


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_exists(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = set(re.findall(r"`make ([a-z-]+)", text_of(page)))
    used |= {line.split()[1] for line in code_lines(text_of(page)) if line.startswith("make ")}
    assert used <= targets, f"{page} uses {sorted(used - targets)}"


def shape(line: str) -> str:
    """The first words of a line of output with numbers, sizes and times left out."""
    words = re.sub(r"-{4,}", "-", re.sub(r"[\d.,/]+", "#", line)).split()
    return " ".join(words[:3])


def run(line: str, folder: Path) -> str:
    """A command of the tutorial on little data, in this process's Python."""
    compare = line.split()[1] == "compare"  # which prints gains only of what has learned
    words = shlex.split(
        re.sub(r"--rounds 10\b", f"--rounds {6 if compare else 2}", line).replace("--rounds 12", "--rounds 3")
    )
    if words[1] in ("run", "compare") or words[1:3] == ["flower", "run"]:
        words += ["--set", "local.lr=0.2" if compare else "local.epochs=1", "--set", "data.limit=400"]
    if words[1] in ("run", "compare", "resume"):
        words += ["--workers", "0"]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**_environment(), "COLUMNS": "120"},
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_the_tutorial_shows_what_is_printed(tmp_path: Path) -> None:
    blocks = [block for language, block in FENCE.findall(TUTORIAL) if language == "console"]
    ran = 0
    for block in blocks:
        line, *shown = block.strip().splitlines()
        if not line.startswith("$ fedfp8"):
            continue  # the examples have tests of their own
        if line.startswith("$ fedfp8 flower"):
            pytest.importorskip("flwr", reason='this part of the tutorial needs `pip install "fedfp8[flower]"`')
        printed = {shape(printed_line) for printed_line in run(line.removeprefix("$ "), tmp_path).splitlines()}
        missing = [text for text in shown if shape(text) not in printed]
        assert not missing, f"{line} no longer prints {missing}; it prints {sorted(printed)}"
        ran += 1
    assert ran >= 6


# The guides


def python_blocks(page: str) -> list[str]:
    return [block for language, block in FENCE.findall(text_of(page)) if language == "python"]


def test_the_new_model_of_the_guide_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason='the digits come with `pip install "fedfp8[digits]"`')
    from torch import nn

    import fedfp8
    from fedfp8.models import MODELS, Network

    made, entry = python_blocks("docs/guides/new-model.md")
    names: dict[str, Any] = {"nn": nn, "Network": Network}
    exec(made, names)
    for name, model in eval(f"{{{entry}}}", names).items():
        monkeypatch.setitem(MODELS, name, model)
    config = fedfp8.preset("digits", "dq", model__name="mlp", round__count=1, local__epochs=1, data__limit=400)
    assert len(fedfp8.run(config, workers=0).rounds) == 2


def test_the_new_data_set_of_the_guide_is_one() -> None:
    from fedfp8.data.spec import Spec
    from fedfp8.data.transform import ImageTransform

    spec, transform = python_blocks("docs/guides/new-data-set.md")
    named = eval(f"{{{transform}}}", {"ImageTransform": ImageTransform})
    found = eval(spec, {"Spec": Spec})
    assert list(named) == [found.name] and len(named[found.name].mean) == found.shape[0]


# The notebook


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn", reason='the tour needs `pip install "fedfp8[digits]"`')
    cells = json.loads((ROOT / "examples/tour.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "the notebook is kept without outputs"
            exec(compile("".join(cell["source"]), f"tour.ipynb, {cell['id']}", "exec"), names)
    printed = capsys.readouterr().out
    assert (
        abs(names["stochastic"].mean().item() - 0.9) < 5 * names["stochastic"].std().item() / len(names["value"]) ** 0.5
    )
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["ratio"] > 10 and "38282 parameters" in printed


def test_one_version() -> None:
    import fedfp8

    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'path = "src/fedfp8/__init__.py"' in project
    assert not re.search(r'^version = "', project, re.M)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited and cited[1] == fedfp8.__version__


# The site itself: where mkdocs is installed (`make docs`; CI runs that target)


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason='the site needs `pip install "fedfp8[docs]"`; `make docs` installs it')
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env=_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outside = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="?https?://')
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30 and not [p for p in pages if outside.search(p.read_text())]
