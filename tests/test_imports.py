"""Imports go one way (docs/architecture.md), `import fedfp8` stays light, and the core needs four packages."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "fedfp8"
# From left to right; a package (or module) may import those of earlier lines, never one of its own or a later line.
ORDER = [
    {"errors", "machine", "modules", "rng", "text"},
    {"fp8"},
    {"model"},
    {"nn", "wire", "data", "models"},
    {"packing", "link"},
    {"fl"},
    {"flower", "nvflare", "paper"},
    {"bench"},
    {"cli"},
]
RANK = {package: rank for rank, packages in enumerate(ORDER) for package in packages}


def imported_by(tree: ast.AST, inside: str) -> set[str]:
    """Packages of fedfp8 that a module `inside` one imports, anywhere in it: type-checking and lazily, too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = inside.rsplit(".", node.level - 1)[0] if node.level > 1 else inside
            module = f"{base}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "fedfp8" else [module]
        else:
            continue
        parts = [name.split(".") for name in names]
        found |= {p[1] for p in parts if p[0] == "fedfp8" and len(p) > 1 and p[1] in RANK}
    return found


def modules() -> list[Path]:
    return sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py", PACKAGE / "__main__.py"})


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_one_way_imports(path: Path) -> None:
    package = package_of(path)
    assert package in RANK, f"{package} is new: give it a place in ORDER and in docs/architecture.md"
    inside = ".".join(["fedfp8", *path.relative_to(PACKAGE).parts[:-1]])
    for other in imported_by(ast.parse(path.read_text()), inside) - {package}:
        assert RANK[other] < RANK[package], f"{path.relative_to(PACKAGE)} imports {other}, which is not to its left"


@pytest.mark.parametrize("package", sorted(PACKAGE.rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_no_name_hides_its_module(package: Path) -> None:
    """Else `import fedfp8.fl.run as m` gives a function."""
    inside = ".".join(["fedfp8", *package.relative_to(PACKAGE).parts[:-1]])
    imports = [node for node in ast.parse(package.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports if node.module != inside for alias in node.names}
    hidden = names & {path.stem for path in package.parent.glob("*.py")}
    assert not hidden, hidden


def test_the_order_is_the_documented_one() -> None:
    page = (PACKAGE.parent.parent / "docs" / "architecture.md").read_text()
    chain = next(line for line in page.splitlines() if line.strip().startswith("errors, machine"))
    documented = [{package.strip() for package in part.strip(" {}").split(",")} for part in chain.split("->")]
    assert documented == ORDER


def test_the_checker_sees_every_way_to_import() -> None:
    source = "import fedfp8.fl\nfrom fedfp8 import models as m\nfrom fedfp8.wire import encode\nfrom .. import nn\n"
    assert imported_by(ast.parse(source), "fedfp8.data") == {"fl", "models", "wire"} | {"nn"}
    assert imported_by(ast.parse("def f():\n    from ..cli import main\n"), "fedfp8.data") == {"cli"}


def test_only_the_engines_of_one_machine_use_the_help_for_testing() -> None:
    users = {path.relative_to(PACKAGE).as_posix() for path in modules() if "flower.testing" in path.read_text()}
    assert users == {"flower/__init__.py", "flower/method/launch.py"}


def test_the_reference_shares_no_code_with_what_it_checks() -> None:
    tree = ast.parse(Path(__file__).with_name("fp8_reference.py").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [alias.name for node in imported for alias in node.names] == ["numpy"]


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, timeout=600
    ).stdout.strip()


def test_import_is_light_and_silent() -> None:
    """Not even torch: `import fedfp8` costs what the standard library's own modules cost."""
    code = "import sys; before = set(sys.modules); import fedfp8; print(*(set(sys.modules) - before))"
    added = {name.partition(".")[0] for name in python(code).split()} - sys.stdlib_module_names
    assert added == {"fedfp8"}


# Public names


def test_every_public_name_exists_and_is_listed() -> None:
    code = "import fedfp8 as f; print({*f.__all__} - {*dir(f)}, {name for name in dir(f) if not hasattr(f, name)})"
    assert python(code) == "set() set()"


def test_tools_and_python_see_the_same_names() -> None:
    import fedfp8

    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert shown == {*fedfp8.__all__, *fedfp8._MODULES}


def test_mypy_shows_real_signatures(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import fedfp8\nreveal_type(fedfp8.run)\nreveal_type(fedfp8.prepare)\nreveal_type(fedfp8.preset())\n"
        "reveal_type(fedfp8.resume('x').rounds)\nreveal_type(fedfp8.RunError())\nfedfp8.quantise\n"
    )
    options = [
        "--config-file",
        PACKAGE.parents[1] / "pyproject.toml",
        "--cache-dir",
        PACKAGE.parents[1] / ".mypy_cache",
    ]
    command = [sys.executable, "-m", "mypy", *options, script]
    environment = os.environ | {"MYPYPATH": str(PACKAGE.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    lines = [line for line in done.stdout.splitlines() if "script.py" in line]
    assert len(lines) == 6, done.stdout + done.stderr
    run, prepare, config, rounds, error, typo = lines
    assert "def (config: fedfp8.fl.config.Config, *, model: torch.nn" in run and "-> fedfp8.fl.runs.History" in run
    assert "def (model: torch.nn.modules.module.Module, format: fedfp8.fp8.format.Format" in prepare
    assert '"fedfp8.fl.config.Config"' in config and '"list[dict[str, Any]]"' in rounds
    assert '"fedfp8.errors.RunError"' in error and 'has no attribute "quantise"' in typo


# Extras

PROJECT = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["project"]
CORE = {"torch", "numpy", "numba", "safetensors"}


def test_the_oldest_flower_that_is_tested_is_the_oldest_that_is_allowed() -> None:
    makefile = (PACKAGE.parents[1] / "Makefile").read_text()
    oldest = re.search(r"^OLDEST := (\d+\.\d+)\.0$", makefile, re.M)
    assert oldest and f"flwr[simulation]>={oldest[1]},<" in PROJECT["optional-dependencies"]["flower"][0]
    assert "make test-oldest" in (PACKAGE.parents[1] / ".ci" / "run").read_text()


def closure(names: set[str]) -> set[str]:
    """Distributions that installing `names` brings, without extras."""
    found: set[str] = set()
    todo = set(names)
    while todo:
        found |= todo
        needed = [r for name in todo for r in requires(name) or [] if "extra ==" not in r]
        todo = {distribution(r) for r in needed if distribution(r) in INSTALLED} - found
    return found


def distribution(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


INSTALLED = {distribution(name) for names in packages_distributions().values() for name in names}
BLOCKED = '''
import sys
from importlib.machinery import PathFinder

class Installed:
    """Finds nothing for what is blocked, as if it were not there: torch also asks whether a package is."""

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked} else PathFinder.find_spec(name, path, target)

sys.meta_path = [Installed() if finder is PathFinder else finder for finder in sys.meta_path]
'''


def core_only(code: str) -> subprocess.CompletedProcess[str]:
    """`code` where nothing but the core's packages (and what they need) can be imported."""
    allowed = {*closure(CORE), "fedfp8", "setuptools"}  # torch imports setuptools where it is there
    modules = {m for m, dists in packages_distributions().items() if not allowed & {distribution(d) for d in dists}}
    code = BLOCKED.format(blocked=modules) + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


def test_the_core_needs_four_packages(tmp_path: Path) -> None:
    assert {distribution(d) for d in PROJECT["dependencies"]} == CORE
    done = core_only(f"""
import torch, fedfp8, fedfp8.data, fedfp8.paper, fedfp8.models
model = fedfp8.prepare(torch.nn.Sequential(torch.nn.Linear(4, 3)))
state = fedfp8.unpack(fedfp8.pack(model, seed=1), model)
assert fedfp8.inspect(fedfp8.pack(model, seed=2, reference=state, with_layout=True)).rows
x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
own = dict(model=torch.nn.Linear(4, 2), clients=[(x, (x[:, 0] > 0).long())] * 3, test=(x, (x[:, 0] > 0).long()))
config = fedfp8.preset("digits", "dq", round__count=1, clients__fraction=1.0)
done = fedfp8.run(config, **own, out={str(tmp_path / "run")!r})
assert fedfp8.resume({str(tmp_path / "run")!r}, **own).summary == done.summary
print("ok")
""")
    assert done.stdout.split() == ["ok"], done.stderr


@pytest.mark.parametrize(
    "extra, code",
    [
        ("cli", "from fedfp8.__main__ import main; main()"),
        ("digits", "import fedfp8; fedfp8.run(fedfp8.preset('digits'))"),
        ("data", "from fedfp8.data.manage import fetch; fetch('cifar10')"),
        ("plots", "from fedfp8.paper.plots import new_figure; new_figure(1, 1)"),
        ("flower", "import fedfp8; fedfp8.flower"),
        ("nvflare", "import fedfp8; fedfp8.nvflare"),
    ],
)
def test_what_is_missing_names_its_extra(extra: str, code: str) -> None:
    done = core_only(code)
    assert done.returncode == 1 and f'pip install "fedfp8[{extra}]"' in done.stderr.splitlines()[-1], done.stderr
    assert extra in PROJECT["optional-dependencies"]
    if extra == "cli":
        assert done.stderr.count("\n") == 1  # no traceback


def test_every_extra_that_an_error_names_exists() -> None:
    text = "".join(path.read_text() for path in modules())
    named = set(re.findall(r'extra\("(\w+)"\)', text)) | set(re.findall(r"fedfp8\[(\w+)\]", text))
    assert {"data", "digits", "flower", "nvflare", "plots"} <= named <= set(PROJECT["optional-dependencies"])
