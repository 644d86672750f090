"""The server: FedAvg over all clients, tested after every round. `wire = "plain"` is the app without fedfp8."""

import json
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedfp8.flower import FP8
from lora_app.border import to_record
from lora_app.task import load, network, test_loss

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    model, start = network(settings)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        load(model, arrays.to_torch_state_dict())
        return MetricRecord({"loss": test_loss(model)})

    fraction, nodes = float(settings["fraction"]), int(settings["clients"])
    strategy: Strategy = FedAvg(fraction_train=fraction, fraction_evaluate=0.0, min_available_nodes=nodes)
    if settings["wire"] != "plain":
        strategy = FP8(strategy, str(settings["wire"]), start=to_record(start) if settings["shared-start"] else None)
    result = strategy.start(grid, to_record(start), num_rounds=int(settings["num-rounds"]), evaluate_fn=evaluate)
    if settings["out"]:
        losses = {r: m["loss"] for r, m in result.evaluate_metrics_serverapp.items()}
        Path(str(settings["out"])).write_text(json.dumps(losses))
