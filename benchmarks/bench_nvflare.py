"""Bytes and accuracy of one FLARE job (the quickstart's digits) as it is, with FLARE's own filters, and with fedfp8.

    python benchmarks/bench_nvflare.py [--rounds 10] [--only fedfp8]
    python benchmarks/bench_nvflare.py --seeds 10          # how far accuracies spread; without the simulator, a minute

Needs the extra `nvflare`, and bitsandbytes, which FLARE's filters import. All rows run FLARE's FedAvg recipe in its
simulator: 2 sites, the same data, the same first model. Bytes are those of all arrays in the messages as they leave the
server and as they reach it, headers not counted.

With --seeds the same sites and rounds run in this process, over the links that the filters use, for many first models
and orders of batches: one run says little of the accuracy.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch.nn.functional import cross_entropy

import fedfp8
from fedfp8.text import markdown_table

EXAMPLE = Path(__file__).parent.parent / "examples" / "nvflare-quickstart"


def array_bytes(content: Any) -> int:
    if isinstance(content, DXO):
        return array_bytes(content.data) + array_bytes(content.meta)
    if isinstance(content, dict):
        return sum(map(array_bytes, content.values()))
    if isinstance(content, bytes):
        return len(content)
    return content.nbytes if isinstance(content, np.ndarray | np.generic | torch.Tensor) else 0


class Count(Filter):
    """Counts what passes, and changes nothing."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.bytes = way, 0

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        self.bytes += array_bytes(dict(shareable.get("DXO", {})))
        return shareable

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.END_RUN:
            folder = fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id())
            (Path(folder) / f"bytes-{self.way}.json").write_text(json.dumps(self.bytes))


def flare_filters(kind: str) -> Callable[[Any], None]:
    def add(recipe: Any) -> None:
        from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
        from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer

        recipe.add_server_output_filter(ModelQuantizer(quantization_type=kind), tasks=["train"])
        recipe.add_client_input_filter(ModelDequantizer(), tasks=["train"])
        recipe.add_client_output_filter(ModelQuantizer(quantization_type=kind), tasks=["train"])
        recipe.add_server_input_filter(ModelDequantizer(), tasks=["train"])

    return add


def fedfp8_filters(wire: str) -> Callable[[Any], None]:
    def add(recipe: Any) -> None:
        import fedfp8.nvflare

        fedfp8.nvflare.add_to(recipe, wire, seed=1)

    return add


ROWS: dict[str, Callable[[Any], None]] = {
    "plain": lambda recipe: None,
    "FLARE float16": flare_filters("float16"),
    "FLARE adaquant": flare_filters("adaquant"),
    "fedfp8 fp8": fedfp8_filters("fp8"),
    "fedfp8 dq": fedfp8_filters("dq"),
}


def run(name: str, rounds: int, folder: Path) -> tuple[float, int, int]:
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import SimEnv

    sys.path.insert(0, str(EXAMPLE))
    from model import Net, digits

    torch.manual_seed(0)
    recipe = FedAvgRecipe(
        name="digits", model=Net(), min_clients=2, num_rounds=rounds, train_script=str(EXAMPLE / "client.py")
    )
    recipe.add_server_input_filter(Count("up"), tasks=["train"])
    ROWS[name](recipe)
    recipe.add_server_output_filter(Count("down"), tasks=["train"])
    recipe.execute(SimEnv(num_clients=2, workspace_root=str(folder)))
    results = folder / "digits" / "server" / "simulate_job"
    model, saved = Net().eval(), torch.load(results / "app_server" / "FL_global_model.pt", weights_only=False)["model"]
    model.load_state_dict({key: torch.as_tensor(value) for key, value in saved.items()})
    *_, images, labels = digits(0, 1)
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    down, up = (json.loads((results / f"bytes-{way}.json").read_text()) for way in ("down", "up"))
    return accuracy, down, up


def accuracy_without_flare(wire: str, seed: int, rounds: int) -> float:
    """Of the model after the last round: the job of the example, with wire "" as it is."""
    sys.path.insert(0, str(EXAMPLE))
    from model import Net, digits

    torch.manual_seed(seed)
    model, sites = Net(), {name: digits(number, 2) for number, name in enumerate(("site-1", "site-2"))}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    server = fedfp8.ServerLink(wire, seed=seed) if wire else None
    links = {site: fedfp8.ClientLink() for site in sites}
    for _ in range(rounds):
        payloads = server.broadcast(state, clients=list(sites)) if server else {}
        results = []
        for site, (images, labels, _, _) in sites.items():
            model.load_state_dict(links[site].receive(payloads[site]) if server else state)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for batch in (batch for _ in range(2) for batch in torch.randperm(len(labels)).split(32)):
                if len(batch) > 1:
                    optimizer.zero_grad()
                    cross_entropy(model(images[batch]), labels[batch]).backward()
                    optimizer.step()
            trained = {name: value.clone() for name, value in model.state_dict().items()}
            results.append(
                (2 * len(labels) // 32, server.receive(site, links[site].reply(trained)) if server else trained)
            )
        total = sum(steps for steps, _ in results)
        state = {name: sum(steps * result[name] for steps, result in results) / total for name in state}
    model.load_state_dict(state)
    *_, images, labels = digits(0, 1)
    return (model.eval()(images).argmax(1) == labels).float().mean().item()


def spread(seeds: int, rounds: int) -> str:
    torch.set_num_threads(1)
    rows = []
    for name, wire in (("none", ""), ("fp8", "fp8"), ("dq", "dq")):
        found = [100 * accuracy_without_flare(wire, seed, rounds) for seed in range(seeds)]
        mean = f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} %"
        rows.append([name, mean, f"{min(found):.1f} to {max(found):.1f} %"])
    return markdown_table(["wire", f"accuracy, {seeds} runs", "from, to"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="rows whose names match this pattern")
    parser.add_argument(
        "--seeds", type=int, default=0, help="the spread of the accuracy over this many runs, at least 2"
    )
    arguments = parser.parse_args()
    if arguments.seeds:
        print(spread(arguments.seeds, arguments.rounds))
        return
    rows, plain = [], 0
    for name in ROWS:
        if re.search(arguments.only, name):
            with tempfile.TemporaryDirectory() as folder:
                accuracy, down, up = run(name, arguments.rounds, Path(folder))
            plain = plain or down + up
            share = (down + up) / plain
            rows.append([name, f"{down:,}", f"{up:,}", f"{100 * share:.1f} %", f"{100 * accuracy:.1f} %"])
    print(markdown_table(["filters", "down, bytes", "up, bytes", "of plain", "accuracy"], rows))


if __name__ == "__main__":
    main()
