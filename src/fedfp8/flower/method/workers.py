"""Clients behind a Flower Grid, as `fl.simulate.Workers`: tasks become messages, replies come back in client order."""

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedfp8.errors import RunError
from fedfp8.fl.client import Assignment, Reply
from fedfp8.flower.method.messages import read_reply, train_message
from fedfp8.link import ServerLink

__all__ = ["GridWorkers"]

POLL = 0.2  # seconds between looks for nodes that have not come yet


class GridWorkers:
    """`nodes` SuperNodes, of which number p (node config ``partition-id``) serves the clients k with k mod nodes = p.

    timeout: seconds to wait for the replies of a round; a client that is silent for longer is left out of it.
    wait: seconds to wait for all nodes before the first round.
    """

    def __init__(
        self,
        grid: Grid,
        link: ServerLink,
        *,
        nodes: int,
        timeout: float = 3600.0,
        wait: float = 300.0,
    ) -> None:
        self.grid, self.link = grid, link
        self.count, self.timeout, self.wait = nodes, timeout, wait
        self.notes: list[str] = []
        self.nodes: dict[int, int] = {}  # partition -> node
        self._asked: set[int] = set()

    def train(self, assignments: Iterable[Assignment]) -> Iterator[Reply]:
        """Replies in the order of the tasks; a client that lost its reference is sent the model again without one."""
        self._find_nodes()
        todo = list(assignments)
        answers = self._exchange(todo)
        lost = [self._whole(assignment) for assignment in todo if answers[assignment.client][1]]
        if lost:
            self.notes.append(f"{len(lost)} clients had lost their reference and were sent the whole model")
            for assignment, (reply, _) in zip(lost, self._exchange(lost).values(), strict=True):
                answers[assignment.client] = reply, False
        for assignment in todo:
            yield answers[assignment.client][0]

    def _exchange(self, assignments: list[Assignment]) -> dict[int, tuple[Reply, bool]]:
        """Send, wait, and match what came back by message id, which the network vouches for, not by what it claims.

        A node gets one message at a time: Flower keeps the state that the last one of several leaves, on Ray, so what
        the others received would be forgotten.
        """
        answers: dict[int, tuple[Reply, bool]] = {}
        turns: defaultdict[int, deque[Assignment]] = defaultdict(deque)
        for assignment in assignments:
            node = self.nodes.get(assignment.client % self.count)
            silent = f"no reply within {self.timeout:.0f} s"
            reason = silent if node is not None else f"no node serves partition {assignment.client % self.count}"
            answers[assignment.client] = Reply(assignment.client, error=reason), False
            if node is not None:
                turns[node].append(assignment)
        sent = dict(self._send_next(turns, list(turns)))
        deadline, pause = time.monotonic() + self.timeout, 0.05
        while sent and time.monotonic() < deadline:
            replies = [r for r in self.grid.pull_messages(list(sent)) if r.metadata.reply_to_message_id in sent]
            for reply in replies:
                node, assignment = sent.pop(reply.metadata.reply_to_message_id)
                answers[assignment.client] = read_reply(assignment, reply)
                sent |= self._send_next(turns, [node])
            if not replies:
                time.sleep(pause)
                pause = min(2 * pause, getattr(self.grid, "pull_interval", 0.1))
        return answers

    def _send_next(
        self, turns: dict[int, deque[Assignment]], nodes: Iterable[int]
    ) -> Iterator[tuple[str, tuple[int, Assignment]]]:
        """(message id, (node, assignment)) of the next message to each of these nodes."""
        for node in nodes:
            while turns[node]:
                assignment = turns[node].popleft()
                if ids := [id for id in self.grid.push_messages([train_message(assignment, node)]) if id]:
                    yield ids[0], (node, assignment)
                    break  # none: Flower has said why

    def _whole(self, assignment: Assignment) -> Assignment:
        """The assignment with its model coded on its own: what the server quantized, in more bytes."""
        assert self.link.round is not None
        return replace(assignment, payload=self.link.round.whole(assignment.client))

    def _find_nodes(self) -> None:
        """Know a node for every partition before the first round; later, welcome nodes that came (again)."""
        first, deadline = not self.nodes, time.monotonic() + self.wait
        while True:
            ids = set(self.grid.get_node_ids())
            if not first or len(ids) >= self.count:
                self._ask(ids)
            if not first or len(self.nodes) == self.count:
                return
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.count)) - set(self.nodes))
                raise RunError(
                    f"{len(ids)} nodes are connected and {len(self.nodes)} of {self.count} partitions are served after "
                    f"{self.wait:.0f} s (missing: {missing[:5]}); start the other SuperNodes with --node-config "
                    f"'partition-id=P num-partitions={self.count}'"
                )
            time.sleep(POLL)

    def _ask(self, ids: set[int]) -> None:
        """Ask every new node once which partition it serves."""
        self._asked &= ids
        new = sorted(ids - self._asked)
        if not new:
            return
        messages = [Message(RecordDict(), node, MessageType.QUERY) for node in new]
        for reply in self.grid.send_and_receive(messages, timeout=min(self.timeout, self.wait)):
            if reply.has_error():
                continue
            node = reply.metadata.src_node_id
            claim = reply.content.config_records.get("node", ConfigRecord())
            partition, of = claim.get("partition-id"), claim.get("num-partitions")
            self._asked.add(node)
            if of != self.count or not isinstance(partition, int) or not 0 <= partition < self.count:
                self.notes.append(f"node {node} serves partition {partition} of {of}, not of {self.count}: ignored")
            elif self.nodes.get(partition, node) in ids - {node}:
                self.notes.append(f"node {node} claims partition {partition}, which another node serves: ignored")
            else:
                self.nodes[partition] = node
