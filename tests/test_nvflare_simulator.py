"""Real jobs in FLARE's simulator: server and sites are processes, the recipe is its own FedAvg, the digits are real."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("nvflare", reason='NVIDIA FLARE is not installed: pip install "fedfp8[nvflare]"')

EXAMPLE = Path(__file__).parent.parent / "examples" / "nvflare-quickstart"

# The quickstart's site, with something going wrong once it has the model, and its network with a counter in it.
CLIENT, AFTER = (EXAMPLE / "client.py").read_text(), "    received = flare.receive()\n"
MODEL = (EXAMPLE / "model.py").read_text().replace("nn.ReLU()", "nn.BatchNorm1d(256), nn.ReLU()", 1)
assert AFTER in CLIENT and "BatchNorm1d" in MODEL

SENDS_NONSENSE = """
    if site == 0:
        import numpy, fedfp8.nvflare.filters as filters
        from nvflare.apis.dxo import DXO
        bad = {"fedfp8": numpy.arange(99, dtype=numpy.uint8)}
        if received.current_round == 0:
            bad = {name: value.numpy() * numpy.nan for name, value in received.params.items()}
        filters.SendUpdate.process_dxo = lambda self, dxo, shareable, ctx: DXO("WEIGHTS", bad)
"""
LOSES_ITS_MODEL = """
    import pathlib
    for file in pathlib.Path.cwd().rglob("received.bin"):
        if site == 0 and received.current_round == 1 and "site-1" in str(file):
            file.unlink()
"""


def run(
    folder: Path, *, convert: bool = True, rounds: int = 3, fault: str = "", threads: int = 2, **recipe_args: Any
) -> Any:
    """(accuracies of the last round's model and of the last saved one, the server's log, traffic rows)"""
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    import fedfp8.nvflare

    (folder / "model.py").write_text(MODEL)
    script = folder / "client.py"
    script.write_text(CLIENT.replace(AFTER, AFTER + fault))
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("model", None)
    from model import Net, digits

    monkeypatch.undo()
    torch.manual_seed(0)
    recipe = FedAvgRecipe(
        name="digits", model=Net(), min_clients=2, num_rounds=rounds, train_script=str(script), **recipe_args
    )
    if convert:
        fedfp8.nvflare.add_to(recipe, seed=1)
    workspace = folder / "workspace"
    recipe.execute(SimEnv(num_clients=2, num_threads=threads, workspace_root=str(workspace)))
    server = workspace / "digits" / "server"
    log = (server / "log.txt").read_text()
    saved = torch.load(server / "simulate_job" / "app_server" / "FL_global_model.pt", weights_only=False)["model"]
    model = Net().eval()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in saved.items()})
    *_, images, labels = digits(0, 1)
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    traffic = server / "simulate_job" / "fedfp8-traffic.json"
    return accuracy, log, json.loads(traffic.read_text()) if traffic.exists() else []


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert os.getcwd() == str(tmp_path)


def answered(log: str) -> int:
    return len(re.findall(r"Aggregated \d/2 results", log))


@pytest.mark.nvflare
def test_flares_own_fedavg_learns_in_few_bytes(tmp_path: Path) -> None:
    accuracy, log, rows = run(tmp_path)
    assert accuracy > 0.85 and answered(log) == 6
    assert [len(row["down"]) for row in rows] == [len(row["up"]) for row in rows] == [2, 2, 2]
    assert all(not row["resent"] for row in rows)
    assert sum(sum(row[way].values()) for row in rows for way in ("down", "up")) < 12 * rows[0]["plain"] / 8


@pytest.mark.slow
@pytest.mark.parametrize("args", [{}, {"params_transfer_type": "DIFF"}, {"server_expected_format": "pytorch"}], ids=str)
def test_as_accurate_as_plain(tmp_path: Path, args: dict[str, str]) -> None:
    """Of 360 test digits; with 19 of 20 right one model's accuracy has sigma sqrt(0.05 * 0.95 / 360) = 1.1 %, so 4 % is
    2.5 sigma of the difference of two models that are independent, which these are not: data and test are the same."""
    for name in ("plain", "converted"):
        (tmp_path / name).mkdir()
    plain, log, _ = run(tmp_path / "plain", convert=False, rounds=6, **args)
    converted, converted_log, _ = run(tmp_path / "converted", rounds=6, **args)
    assert answered(log) == answered(converted_log) == 12
    assert converted > 0.93 and converted > plain - 0.04


@pytest.mark.slow
def test_a_hostile_site_loses_its_updates_and_nothing_else(tmp_path: Path) -> None:
    accuracy, log, _ = run(tmp_path, fault=SENDS_NONSENSE)
    assert accuracy > 0.8 and answered(log) == 3
    assert len(re.findall(r"ERROR.*an update is left out; client 'site-1'", log)) == 3
    assert "Finished FedAvg" in log and "client 'site-2'" not in log


@pytest.mark.slow
def test_a_lost_model_is_sent_whole_within_the_task(tmp_path: Path) -> None:
    """One thread for two sites: every task is a new process, and what it holds is the file."""
    accuracy, log, rows = run(tmp_path, fault=LOSES_ITS_MODEL, threads=1)
    assert accuracy > 0.85 and answered(log) == 6
    assert [sorted(row["resent"]) for row in rows] == [[], [], ["site-1"]]
