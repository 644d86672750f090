"""examples/flower-baseline gives the bytes of `fedfp8 run`; examples/docker starts what the documentation starts."""

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
import yaml
from flwr.app import Context, RecordDict

from fedfp8.errors import ConfigError, RunError
from fedfp8.fl import preset, run
from fedfp8.flower import LocalGrid
from fedfp8.flower.method.app import config_of

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "examples/flower-baseline"


def context(**run_config: Any) -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config)


def test_a_run_config_by_preset_and_method() -> None:
    want = preset("lenet-cifar10-iid", "uq+", round__count=7, data__dir="/data")
    found = config_of(context(preset="lenet-cifar10-iid", method="uq+", set="round.count=7 data.dir=/data"))
    assert found == want
    assert config_of(context(preset="digits", method="dq")) == preset("digits", "dq")
    with pytest.raises(RunError, match="neither an entry 'fedfp8' nor 'preset' and 'method'"):
        config_of(context(preset="digits"))
    with pytest.raises(ConfigError, match=r"did you mean round\.count"):
        config_of(context(preset="digits", method="dq", set="round.cuont=3"))


def test_the_baseline_gives_the_bytes_of_fedfp8_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((BASELINE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    cut = "round.count=1 clients.count=4 clients.fraction=0.5 local.epochs=1"
    settings = project["config"] | {"out": str(tmp_path / "run"), "set": cut, "nodes": 2}
    monkeypatch.syspath_prepend(BASELINE)
    apps = {}
    for side, where in project["components"].items():
        module, _, name = where.partition(":")
        apps[side] = getattr(importlib.import_module(module), name)
    LocalGrid(apps["clientapp"], 2, settings).serve(apps["serverapp"], settings)
    for name in [n for n in sys.modules if n.startswith("fedfp8_baseline")]:
        monkeypatch.delitem(sys.modules, name)
    lines = (tmp_path / "run/history.jsonl").read_text()
    config = preset("digits", "dq", round__count=1, clients__count=4, clients__fraction=0.5, local__epochs=1)
    want = run(config).rounds[-1]
    for digest in ("digest_down", "digest_up", "model"):
        assert want[digest] in lines


def test_docker_starts_what_the_documentation_starts() -> None:
    """There is no Docker here; but its YAML is YAML, and every option is one of the documented, tested steps."""
    compose = yaml.safe_load((ROOT / "examples/docker/compose.yml").read_text())
    services = compose["services"]
    assert set(services) == {"setup", "superlink", "register", "supernode-0", "supernode-1", "app"}
    steps = (ROOT / "docs/flower.md").read_text().split("## A deployment, step by step")[1]
    for name, service in services.items():
        assert service["image"] == "fedfp8" and service["environment"]["FLWR_TELEMETRY_ENABLED"] == "0", name
        command = service["command"]
        text = command if isinstance(command, str) else command[-1]
        for option in re.findall(r"(?<!\S)--[a-z-]+", text):
            assert option in steps, f"{name}: {option}"
        for other in service.get("depends_on", []):
            assert other in services
    assert (ROOT / "examples/docker" / "Dockerfile").exists()
    assert services["setup"]["build"]["dockerfile"] == "examples/docker/Dockerfile"
