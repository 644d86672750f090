"""The clients: train on their own part of the data."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import build_model, load_partition, train

app = ClientApp()


@app.train()
def train_one_round(message: Message, context: Context) -> Message:
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = load_partition(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    loss = train(model, x, y, int(context.run_config["local-epochs"]), float(context.run_config["lr"]))
    metrics = MetricRecord({"num-examples": len(y), "loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
