"""A Grid without a network: every node is a Context in this process."""

import copy
import threading
from collections.abc import Iterable
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedfp8.flower.releases import Run, be_in_a_run

__all__ = ["LocalGrid"]

CLIENT_APP_RAISED = 2  # flwr.common.constant.ErrorCode.CLIENT_APP_RAISED_EXCEPTION


class LocalGrid(Grid):
    """`nodes` nodes that run `client_app` one after the other, each with its own state, in the caller's thread.

    Old-style servers call from several threads: their clients run side by side.
    """

    def __init__(self, client_app: ClientApp, nodes: int, run_config: dict | None = None) -> None:
        be_in_a_run()
        self.client_app = client_app
        self.contexts = {
            100 + p: Context(
                run_id=1,
                node_id=100 + p,
                node_config={"partition-id": p, "num-partitions": nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for p in range(nodes)
        }
        self.bytes: dict[str, int] = {"down": 0, "up": 0}  # of all records of all messages
        self._replies: dict[str, Message] = {}
        self._lock = threading.RLock()

    def serve(self, server_app: ServerApp, run_config: dict | None = None) -> None:
        """Run a ServerApp on this grid to its end."""
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=dict(run_config or {}))
        server_app(self, context)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            ids.append(message.metadata.message_id)
            self._replies[ids[-1]] = self._deliver(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, message: Message) -> Message:
        # One client at a time, also where an old-style server asks from several threads: numpy reads the header of an
        # array with Python's parser, which is not safe in threads in Python 3.11 (gh-106905) and raises SystemError.
        with self._lock:
            self.bytes["down"] += _size(message)
            try:
                reply = self.client_app(_own(message), self.contexts[message.metadata.dst_node_id])
            except Exception as error:  # as SuperNodes do
                text = f"{type(error).__name__}: {error}"
                reply = Message(Error(code=CLIENT_APP_RAISED, reason=text), reply_to=message)
            reply.metadata.__dict__["_message_id"] = str(uuid4())
            self.bytes["up"] += _size(reply)
            return reply

    # What else a Grid must have

    def set_run(self, run: Run) -> None:
        """There is one run."""

    @property
    def run(self) -> Run:
        return Run.create_empty(run_id=1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


def _own(message: Message) -> Message:
    """The message as a node would get it over a network: what it takes out of a record is still in everyone else's."""
    own = copy.copy(message)
    records = message.content.items()
    own.content = RecordDict({name: type(record)(dict(record)) for name, record in records})
    return own


def _size(message: Message) -> int:
    """Bytes of the Arrays in a message: what both plain apps and ours spend on models."""
    if message.has_error():
        return 0
    return sum(len(array.data) for record in message.content.array_records.values() for array in record.values())
