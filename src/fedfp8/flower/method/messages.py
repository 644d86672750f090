"""Tasks and replies of the whole method as Flower messages: a payload in one Array, small facts in a ConfigRecord."""

import math

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedfp8.errors import Fedfp8Error
from fedfp8.fl.client import Assignment, Reply
from fedfp8.flower.blob import blob_of, record_of
from fedfp8.link.wire import Orders

__all__ = ["read_assignment", "read_reply", "train_message"]


def train_message(assignment: Assignment, node: int) -> Message:
    orders = assignment.orders.to_bytes()
    where = ConfigRecord({"round": assignment.round, "client": assignment.client, "orders": orders})
    content = RecordDict({"model": record_of(assignment.payload), "task": where})
    return Message(content, node, MessageType.TRAIN, group_id=str(assignment.round))


def read_assignment(message: Message) -> Assignment:
    where = message.content.config_records["task"]
    orders, _ = Orders.split(bytes(where["orders"]))
    payload = blob_of(message.content.array_records.get("model"))
    return Assignment(int(where["round"]), int(where["client"]), payload, orders)


def read_reply(assignment: Assignment, message: Message) -> tuple[Reply, bool]:
    """(the reply to `assignment`, whether the client lost its reference). What is malformed is that client's error."""
    if message.has_error():
        error = message.error
        return Reply(assignment.client, error=f"Flower error {error.code}: {error.reason}"), False
    head = message.content.config_records.get("reply", ConfigRecord())
    if head.get("lost") is True:
        return Reply(assignment.client, error="lost its reference and did not get it again"), True
    if error_text := head.get("error"):
        return Reply(assignment.client, error=str(error_text)), False
    loss, seconds = head.get("loss"), head.get("seconds")
    if not all(isinstance(x, float) and math.isfinite(x) for x in (loss, seconds)):
        reason = f"reported loss {loss!r} after {seconds!r} seconds; numbers are needed"
        return Reply(assignment.client, error=reason), False
    try:
        payload = blob_of(message.content.array_records.get("model"))
    except Fedfp8Error as problem:
        return Reply(assignment.client, error=str(problem)), False
    return Reply(assignment.client, payload, int(head.get("examples", 0)), float(loss), float(seconds)), False
