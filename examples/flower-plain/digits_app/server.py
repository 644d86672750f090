"""The server: FedAvg over all clients, tested after every round."""

import json
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits_app.task import accuracy, build_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    model = build_model()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(model)})

    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=int(context.run_config["nodes"]))
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["num-rounds"]),
        evaluate_fn=evaluate,
    )
    if context.run_config["out"]:
        rounds = {r: m["accuracy"] for r, m in result.evaluate_metrics_serverapp.items()}
        Path(str(context.run_config["out"])).write_text(json.dumps(rounds))
