"""README and docs agree with the disk: tree, links, included example, commands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def tree_paths() -> list[str]:
    """The paths that the README's tree names, each below the folder it is indented under."""
    block = re.search(r"<!-- tree -->\n```\n(.*?)```", README, re.S)
    assert block, "README has no tree"
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
    assert not missing, f"README's tree names {missing}"


def test_every_room_is_in_the_tree():
    named = {p.rstrip("/") for p in tree_paths()}
    rooms = [
        f"src/fedfp8/{p.name}" for p in (ROOT / "src/fedfp8").iterdir() if not p.name.startswith(("__", "py.typed"))
    ]
    assert not set(rooms) - named, f"README's tree lacks {sorted(set(rooms) - named)}"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    targets = [t for t in re.findall(r"\]\(([^)#\s]+)", text) if not t.startswith(("http", "mailto"))]
    missing = [t for t in targets if not ((ROOT / page).parent / t).exists()]
    assert not missing, f"{page} links to {missing}"


def test_the_example_in_the_readme_is_the_tested_file():
    shown = re.search(r"<!-- example:(\S+) -->\n```python\n(.*?)```", README, re.S)
    assert shown, "README shows no example"
    assert shown[2].strip() == (ROOT / shown[1]).read_text().strip()


def test_the_commands_of_the_readme_exist():
    from typer.main import get_command

    from fedfp8.cli import app, commands

    commands.register(app)
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    used = set(re.findall(r"^    fedfp8 (\w+)", README, re.M))
    assert used and used <= known, f"README uses {sorted(used - known)}"
