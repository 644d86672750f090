"""The clients: train the adapters on sentences of their own."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedfp8.flower import fp8_mod_with
from lora_app.border import record_of, to_record
from lora_app.task import load, network, sentences, train


def fp8_mod(message, context, call_next):
    """fedfp8's, with the start that every client can make for itself; a server without FP8 is served as well."""
    return fp8_mod_with(start=lambda: to_record(network(context.run_config)[1]))(message, context, call_next)


app = ClientApp(mods=[fp8_mod])


@app.train()
def train_one_round(message: Message, context: Context) -> Message:
    settings, partition = context.run_config, int(context.node_config["partition-id"])
    model, _ = network(settings)
    load(model, message.content["arrays"].to_torch_state_dict())
    x = sentences(partition, int(settings["sentences"]))
    seed = 1000 * int(message.content["config"]["server-round"]) + partition
    loss = train(model, x, int(settings["local-epochs"]), float(settings["lr"]), seed)
    metrics = MetricRecord({"num-examples": len(x), "loss": loss})
    return Message(RecordDict({"arrays": record_of(model), "metrics": metrics}), reply_to=message)
