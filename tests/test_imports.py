"""Imports go one way (docs/architecture.md), and `import fedfp8` stays light."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "fedfp8"
# From left to right; a room may import rooms of earlier lines, never a room of its own line or a later one.
ORDER = [
    {"errors", "rng", "modules"},
    {"fp8"},
    {"model"},
    {"nn", "wire", "data", "models"},
    {"packing", "link"},
    {"fl"},
    {"flower", "paper"},
    {"bench"},
    {"cli"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}


def rooms_imported(tree: ast.AST, package: str) -> set[str]:
    """Rooms of fedfp8 that a module imports, anywhere in it; type-checking blocks and lazy imports count too."""
    rooms = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            module = f"{base}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "fedfp8" else [module]
        else:
            continue
        parts = [name.split(".") for name in names]
        rooms |= {p[1] for p in parts if p[0] == "fedfp8" and len(p) > 1 and p[1] in RANK}
    return rooms


def modules() -> list[Path]:
    return sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py", PACKAGE / "__main__.py"})


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_one_way_imports(path: Path) -> None:
    room = room_of(path)
    assert room in RANK, f"{room} is a new room: give it a place in ORDER and in docs/architecture.md"
    package = ".".join(["fedfp8", *path.relative_to(PACKAGE).parts[:-1]])
    for other in rooms_imported(ast.parse(path.read_text()), package) - {room}:
        assert RANK[other] < RANK[room], f"{path.relative_to(PACKAGE)} imports {other}, which is not to its left"


def test_the_order_is_the_documented_one() -> None:
    page = (PACKAGE.parent.parent / "docs" / "architecture.md").read_text()
    chain = next(line for line in page.splitlines() if line.strip().startswith("errors, rng"))
    documented = [{room.strip() for room in part.strip(" {}").split(",")} for part in chain.split("->")]
    assert documented == ORDER


def test_the_checker_sees_every_way_to_import() -> None:
    source = "import fedfp8.fl.run\nfrom fedfp8 import models as m\nfrom fedfp8.wire import encode\nfrom .. import nn\n"
    assert rooms_imported(ast.parse(source), "fedfp8.data") == {"fl", "models", "wire"} | {"nn"}
    assert rooms_imported(ast.parse("def f():\n    from ..cli import main\n"), "fedfp8.data") == {"cli"}


def test_nobody_but_tests_uses_the_reference() -> None:
    for path in modules():
        if path.name != "reference.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    imported = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                    assert "fedfp8.fp8.reference" not in imported, path


def test_the_reference_shares_no_code_with_what_it_checks() -> None:
    tree = ast.parse((PACKAGE / "fp8" / "reference.py").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [alias.name for node in imported for alias in node.names] == ["numpy"]


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def test_import_is_light_and_silent() -> None:
    heavy = {"numba", "llvmlite", "matplotlib", "flwr", "datasets", "sklearn", "pyarrow", "typer"}
    assert python(f"import sys, fedfp8; print(sorted(sys.modules.keys() & {heavy}))") == "[]"


def test_import_adds_under_half_a_second_to_torch() -> None:
    code = "import time, torch; start = time.perf_counter(); import fedfp8; print(time.perf_counter() - start)"
    assert statistics.median(float(python(code)) for _ in range(3)) < 0.5


def test_every_public_name_exists() -> None:
    assert python("import fedfp8; print(all(hasattr(fedfp8, name) for name in fedfp8.__all__))") == "True"
