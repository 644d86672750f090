"""What mkdocs asks while it builds the site: pages made from the code, and links to files outside docs/.

Nothing that can be read from the code is written by hand: settings, commands, errors and the public names become pages
here. A link to a source file leads to a page with that file, so that the site needs no network and no host.
"""

import ast
import inspect
import json
import logging
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
PICTURES = (".png", ".svg")
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")  # ](path#anchor), not ](https://...)
log = logging.getLogger("mkdocs.hooks.fedfp8")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from the code."""
    made = {"reference/api.md": api(), "reference/settings.md": settings(), "reference/cli.md": commands()}
    made |= {"reference/errors.md": errors()}
    made |= {PAGES[name]: (ROOT / name).read_text() for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
    linked = sorted(linked_sources(files))
    made |= {uri_of(path): source_page(path) for path in linked if path.suffix not in PICTURES}
    for path in linked:
        if path.suffix in PICTURES:
            files.append(File.generated(config, uri_of(path), abs_src_path=str(path)))
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the page of that file instead."""
    uri = page.file.src_uri
    home = ROOT if uri in PAGES.values() and uri != "index.md" else (DOCS / uri).parent

    def replace(match: re.Match[str]) -> str:
        path = (home / match[2]).resolve()
        if path.is_relative_to(DOCS) and home != ROOT:
            return match[0]  # mkdocs checks it
        if not path.exists():
            log.warning("%s links to %s, which does not exist", uri, match[2])
        return match[1] + posixpath.relpath(uri_of(path), posixpath.dirname(uri) or ".") + match[3]

    return markdown if uri.startswith(("source/", "reference/")) else outside_code(markdown, replace)


def outside_code(markdown: str, replace: Any) -> str:
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


# Files outside docs/


def linked_sources(files: Files) -> set[Path]:
    found = set()
    texts = [(Path(f.abs_src_path).parent, Path(f.abs_src_path).read_text()) for f in files.documentation_pages()]
    texts += [(ROOT, (ROOT / name).read_text()) for name in ("CHANGELOG.md", "CONTRIBUTING.md")]
    for home, text in texts:
        for _, target, _ in LINK.findall(text):
            path = (home / target).resolve()
            if path.exists() and path.is_relative_to(ROOT) and not path.is_relative_to(DOCS):
                found.add(path)
    return {path for path in found if path.name not in PAGES}


def uri_of(path: Path) -> str:
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    source = f"source/{path.relative_to(ROOT).as_posix()}"
    return PAGES.get(path.name) or (source if path.suffix in PICTURES else f"{source}.md")


def source_page(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
        return "\n\n".join(fenced(text, ".py") if is_code else text for text, is_code in texts)
    if path.is_file():
        return f"# {name}\n\n" + fenced(path.read_text(), path.suffix)
    parts = [p for p in sorted(path.rglob("*")) if p.is_file() and p.suffix in (".py", ".toml", ".md")]
    return f"# {name}\n\n" + "\n\n".join(
        f"## {p.relative_to(path)}\n\n{fenced(p.read_text(), p.suffix)}" for p in parts
    )


def fenced(text: str, suffix: str) -> str:
    return f"````{ {'.py': 'python', '.toml': 'toml'}.get(suffix, 'text') }\n{text.rstrip()}\n````"


# Pages made from the code


def api() -> str:
    import fedfp8

    more = {"fedfp8.nn": "report set_rounding", "fedfp8.fl": "with_method with_settings to_toml Pool"}
    more |= {"fedfp8.flower": "fp8_mod fp8_mod_with FP8 FP8FedAvg", "fedfp8.data": "load partition transform_for"}
    more |= {"fedfp8.nvflare": "add_to"}
    parts = [
        "# Python API\n\nFrom the docstrings: the names of `fedfp8` itself, module by module, and some more of `fl`, "
        "`nn`, `data`, `flower` and `nvflare`. Exceptions: [Errors](errors.md).\n"
    ]
    for module in sorted({*fedfp8._NAMES, *more} - {"fedfp8.errors"}):
        names = [*sorted(fedfp8._NAMES.get(module, "").split()), *more.get(module, "").split()]
        parts.append(f"\n## {module}\n")
        parts += [f"::: {home(module, name)}.{name}\n" for name in names]
    return "\n".join(parts)


def home(module: str, name: str) -> str:
    """Where a name is defined."""
    if module in ("fedfp8.flower", "fedfp8.nvflare"):
        return module  # these need packages that `make docs` does not install
    return getattr(getattr(import_module(module), name), "__module__", module) if name[0] != "E" else module


def settings() -> str:
    from fedfp8.fl.config import METHODS, Config
    from fedfp8.fl.describe import describe
    from fedfp8.fl.presets import PRESETS

    config, sections = Config(), defaultdict(list)
    for setting in describe(config):
        sections[setting.key.rpartition(".")[0]].append(setting)
    parts = [
        "# Settings\n\nMade from `fl/config.py`. On the command line `--set section.field=value`, in Python "
        "`preset(name, method, section__field=value)`, in a file `field = value` under `[section]`. `fedfp8 settings` "
        "prints the same list with the values of a preset and a method.\n"
    ]
    for section, found in sections.items():
        about = inspect.getdoc(type(getattr(config, section))) if section else "What a run starts from."
        parts.append(f"## {section or 'top level'}\n\n{about}\n")
        parts.append(table(("key", "default", "meaning"), [(f"`{s.key}`", shown(s.value), s.meaning) for s in found]))
    parts.append("## Methods\n\nA method is a name for these settings.\n")
    parts.append(table(("method", "sets"), [(f"`{name}`", pairs(values)) for name, values in METHODS.items()]))
    parts.append("## Presets\n\nA preset is a name for these settings; all others have their defaults.\n")
    parts.append(table(("preset", "sets"), [(f"`{name}`", pairs(values)) for name, values in PRESETS.items()]))
    return "\n".join(parts)


def shown(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else "(empty)"


def pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"`{key}={shown(value)[1:-1]}`" for key, value in values.items())


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    from fedfp8.text import markdown_table

    return markdown_table(head, rows) + "\n"


def commands() -> str:
    from typer.main import get_command

    from fedfp8.cli import app
    from fedfp8.cli.commands import register

    register(app)
    intro = "Made from the commands' own help. `-h` prints it; `fedfp8 --install-completion` makes Tab know it."
    return f"# Command line\n\n{intro}\n\n" + "\n".join(command_sections(get_command(app), "fedfp8"))


def command_sections(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for sub, child in command.commands.items():
            yield from command_sections(child, f"{name} {sub}")
        return
    about, _, example = inspect.cleandoc(command.help or "").partition("\n\n")
    yield f"## {name}\n\n{about}\n"
    if example:
        yield f"```\n{example}\n```\n" if example.startswith("fedfp8") else f"{example}\n"
    rows = []
    for param in command.params:
        is_option = param.param_type_name == "option"
        called = ", ".join(param.opts) if is_option else param.human_readable_name
        default = (
            "" if param.default in (None, False, "") or callable(param.default) else f" Default: `{param.default}`."
        )
        rows.append((f"`{called}`", f"{getattr(param, 'help', '') or ''}{default}"))
    if rows:
        yield table(("argument", "meaning"), rows)


def errors() -> str:
    import fedfp8.errors as module

    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted((ROOT / "src/fedfp8").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                message = template(node.exc.args[0]) if node.exc.args else ""
                if len(message) > 12:
                    found[node.exc.func.id].append((message, path.relative_to(ROOT / "src/fedfp8").as_posix()))
    parts = [
        "# Errors\n\nEvery message that fedfp8 raises on purpose, read from the code; `…` stands for what was given. "
        "All are `fedfp8.Fedfp8Error`. The command prints them without a traceback and exits with code 1. "
        "What to do about the common ones: [troubleshooting](../troubleshooting.md).\n"
    ]
    for name, kind in vars(module).items():
        if isinstance(kind, type) and issubclass(kind, module.Fedfp8Error) and name != "Fedfp8Error":
            base = ", ".join(b.__name__ for b in kind.__bases__ if b is not module.Fedfp8Error)
            parts.append(f"## {name}\n\n{inspect.getdoc(kind)} Also a `{base}`.\n")
            rows = [(f"`{message}`", f"`{where}`") for message, where in found[name]]
            parts.append(table(("message", "raised in"), rows) if rows else "")
    return "\n".join(parts)


def template(node: ast.expr) -> str:
    """The text of a string or f-string, with … for values; empty for anything else."""
    if isinstance(node, ast.Constant):
        return " ".join(str(node.value).replace("`", "'").split())
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
        return " ".join(text.replace("`", "'").split())
    return ""
