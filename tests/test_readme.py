"""README and the tree in docs/architecture.md agree with the disk. The other pages: test_docs.py."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


def tree_paths() -> list[str]:
    """The paths that the tree names, each below the folder it is indented under."""
    block = re.search(r"<!-- tree -->\n```\n(.*?)```", ARCHITECTURE, re.S)
    assert block, "docs/architecture.md has no tree"
    paths, folders = [], [(-1, "")]
    for line in block[1].splitlines():
        indent = len(line) - len(line.lstrip())
        while folders[-1][0] >= indent:
            folders.pop()
        named = re.split(r"\s{2,}", line.strip())[0].split() if indent else line.split()
        named += re.findall(r"\b\w+\.py\b", line) if line.strip().split()[0].endswith(".py") else []
        parent = folders[-1][1]
        paths += [parent + name for name in dict.fromkeys(named) if name.endswith(("/", ".py"))]
        folders.append((indent, parent + named[0] if named[0].endswith("/") else parent))
    return paths


def test_everything_in_the_tree_exists():
    paths = tree_paths()
    assert len(paths) > 30
    missing = [p for p in paths if not (ROOT / p).exists()]
    assert not missing, f"the tree names {missing}"


def test_every_package_is_in_the_tree():
    named = {p.rstrip("/") for p in tree_paths()}
    packages = [
        f"src/fedfp8/{p.name}" for p in (ROOT / "src/fedfp8").iterdir() if not p.name.startswith(("__", "py.typed"))
    ]
    assert not set(packages) - named, f"the tree lacks {sorted(set(packages) - named)}"


@pytest.mark.parametrize("page", ["README.md", "docs/guides/own-system.md"])
def test_the_example_on_a_page_is_the_tested_file(page):
    shown = re.search(r"<!-- example:(\S+) -->\n```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert shown, f"{page} shows no example"
    assert shown[2].strip() == (ROOT / shown[1]).read_text().strip()


def test_the_readme_tells_the_length_of_the_example():
    assert "in under fifty lines" in README
    module = ast.parse((ROOT / "examples/own_system.py").read_text())
    nodes = [n for n in module.body[1:] if not isinstance(n, ast.Import | ast.ImportFrom)]  # without its docstring
    lines = (ROOT / "examples/own_system.py").read_text().splitlines()
    code = [line for n in nodes for line in lines[n.lineno - 1 : n.end_lineno] if line.strip()]
    assert 40 <= len(code) < 50
