"""`FP8Grid`: a Grid that codes models on their way out and decodes them on their way in.

Strategies send messages with ArrayRecords and get such messages back, whatever they do in between: FP8 stands where
the network begins. Models are exchanged by `ServerLink`s, one for every ArrayRecord of a message. Whatever a node sends
is hostile until it has been checked; what cannot be used becomes an error reply that names the node, and costs its
sender's update and nothing else.
"""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedfp8.errors import ConfigError, Fedfp8Error, QuantizationError, WireFormatError
from fedfp8.flower.blob import STYPE, array_of, numpy_view, record_of, short, split
from fedfp8.flower.releases import log
from fedfp8.flower.wrapper.inner import Inner
from fedfp8.flower.wrapper.mod import LOST
from fedfp8.flower.wrapper.traffic import Phase, Traffic
from fedfp8.link import ServerLink
from fedfp8.link.arrays import Frame, is_coded, tensors_of, torch_of
from fedfp8.link.round import Client, Round
from fedfp8.model.state import State

__all__ = ["FP8Grid", "Sent"]

REJECTED = 0  # the code of Flower's "unknown" errors: none of its own says that a payload is bad
HINT = (
    f"the model came as {STYPE!r} and nobody decoded it: put fp8_mod first in the client's list, "
    "ClientApp(mods=[fp8_mod, ...])"
)
UNDECODED = (STYPE, "pickled (object) data")  # what Flower's or numpy's errors say of our bytes
SECAGG = "secaggplus_configs"  # the record that Flower's SecAgg+ puts into its messages
NO_SECAGG = (
    "secure aggregation adds masked integers, which cannot be coded; run the workflow on the plain Grid, without FP8 "
    "(docs/flower.md says why)"
)
Models = Mapping[str, ArrayRecord]


@dataclass
class Sent:
    """One model of one message. link None: it travels as it is, since coding does not pay."""

    key: str
    client: Client
    record: ArrayRecord
    arrays: dict[str, np.ndarray]
    link: ServerLink | None = None
    round: Round | None = None

    @property
    def views(self) -> dict[str, np.ndarray]:
        """The model's values, also if it travels as it is."""
        return self.arrays or {name: numpy_view(name, array) for name, array in self.record.items()}


@dataclass
class Open:
    """A message that was sent and waits for its reply."""

    message: Message
    models: dict[str, Sent]  # by the name of their blobs
    phase: Phase
    id: str = ""  # that the strategy knows it by
    again: bool = False  # sent once more, whole


class FP8Grid(Grid):
    """`grid` for strategies that know nothing of fedfp8.

    make_link: a new ServerLink, given a name for its seed and the arrays of its first model.
    """

    def __init__(
        self,
        grid: Grid,
        make_link: Callable[[str, dict[str, np.ndarray]], ServerLink],
        inner: Inner,
        traffic: Traffic,
        patterns: tuple[str, ...] = (),
    ) -> None:
        self.grid, self.make_link, self.inner, self.traffic, self.patterns = grid, make_link, inner, traffic, patterns
        self.links: dict[tuple[str, str], ServerLink] = {}  # by record, and by group of nodes where models differ
        self.open: list[Open] = []  # messages without a reply, in the order they were sent
        self.keeps_states = False  # they take as much memory as the replies themselves
        self.states: dict[str, dict[str, State]] = {}  # message id -> what its reply brought, by record
        self._announced: dict[int, deque[dict[str, Sent]]] = defaultdict(deque)
        self._said: set[str] = set()
        self._lock = threading.RLock()

    # What strategies call

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._send(entry) for entry in self._enter(list(messages), apart=bool(self.open))]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        with self._lock:
            entries = {entry.message.metadata.message_id: entry for entry in self.open if entry.id in wanted}
        strange = wanted - {entry.id for entry in entries.values()}
        replies = self.grid.pull_messages([*entries, *strange])
        answers = [self._answer(reply, entries.get(reply.metadata.reply_to_message_id)) for reply in replies]
        return [answer for answer in answers if answer is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """As Flower's, but a node that lost its reference is served while the others are at work."""
        entries = self._enter(list(messages))
        ids = [self._send(entry) for entry in entries]
        return self._consistent(self._wait(ids, timeout), entries)

    # For loops that send and receive by themselves

    def encode(self, messages: Iterable[Message]) -> list[Message]:
        """The messages of a round as they travel."""
        entries = self._enter(list(messages))
        for entry in entries:
            self._encode(entry)
        return [entry.message for entry in entries]

    def decode(self, replies: Iterable[Message], timeout: float | None = None) -> list[Message]:
        """The replies to them, as strategies expect them."""
        entries = {entry.message.metadata.message_id: entry for entry in self.open}
        for id, entry in entries.items():
            entry.id = id
        answers = [self._answer(reply, entries.get(reply.metadata.reply_to_message_id)) for reply in replies]
        again = [id for id, entry in entries.items() if entry.again]
        found = [answer for answer in answers if answer is not None] + self._wait(again, timeout)
        return self._consistent(found, list(entries.values()))

    def _wait(self, ids: list[str], timeout: float | None) -> list[Message]:
        end = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        waiting, pause = [id for id in ids if id], 0.1
        while waiting:
            replies += self.pull_messages(waiting)
            answered = {reply.metadata.reply_to_message_id for reply in replies}
            waiting = [id for id in waiting if id not in answered]
            if not waiting or (end is not None and time.monotonic() > end):
                break
            time.sleep(pause)
            pause = min(2 * pause, getattr(self.grid, "pull_interval", 3.0))  # Flower's own intervals
        replies.sort(key=lambda reply: ids.index(reply.metadata.reply_to_message_id))  # so that sums come out equal
        return replies

    # On the way out

    def announce(self, phase: str, models: list[tuple[int, Models]], *, apart: bool = False) -> None:
        """Open a round: the next message to each of these nodes is of it. apart: without closing the last one."""
        with self._lock:
            if not apart:
                self.open.clear()
                self.states.clear()
                self._announced.clear()
            turns: Counter[int] = Counter()
            found: list[tuple[int, dict[str, Sent]]] = []
            views: dict[int, dict[str, np.ndarray]] = {}  # by object; `models` keeps them all alive
            for node, records in models:
                turns[node] += 1
                again = f"#{turns[node]}" if turns[node] > 1 else ""  # several messages to one node: so many clients
                client: Client = f"{node}{again}" if again else node
                sent = {k + again: Sent(k, client, r, self._arrays(r, views)) for k, r in records.items()}
                found.append((node, sent))
                self._announced[node].append(sent)
            every = [sent for _, models in found for sent in models.values()]
            for key in dict.fromkeys(sent.key for sent in every):
                self._open_links([sent for sent in every if sent.key == key], apart)
            self.traffic.open(phase)

    def _arrays(self, record: ArrayRecord, views: dict[int, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The record's values if it is worth coding, else nothing."""
        if id(record) not in views:
            try:
                arrays = {name: numpy_view(name, array) for name, array in record.items()}
                tensors = {name: torch_of(name, array) for name, array in arrays.items()}
                pays = any(is_coded(name, tensor, self.patterns) for name, tensor in tensors.items())
            except WireFormatError:  # strings, trees, somebody else's bytes
                pays = False
            except QuantizationError as error:  # numbers that no code has a place for
                self._say_once(short(error))
                pays = False
            views[id(record)] = arrays if pays else {}
        return views[id(record)]

    def _open_links(self, models: list[Sent], apart: bool) -> None:
        """One link for all nodes that get one model; where models differ (personalisation), one for each group."""
        worth = [sent for sent in models if sent.arrays]
        if len(worth) < len(models):
            self._say_once(f"record {models[0].key!r} has nothing that pays to be coded; it travels as it is")
        groups: list[list[Sent]] = []
        for sent in worth:
            same = [g for g in groups if not apart and _equal(g[0].record, sent.record)]
            (same[0] if same else groups.append([]) or groups[-1]).append(sent)  # type: ignore[func-returns-value]
        if not apart:
            for link in (link for (key, _), link in self.links.items() if key == models[0].key):
                link.close()
        for number, group in enumerate(groups):
            alone = len(groups) == 1 and not apart
            where = "" if alone else str(group[0].client) if len(group) == 1 else f"group {number}"
            self._open_link(where, group)

    def _open_link(self, where: str, group: list[Sent]) -> None:
        first, clients = group[0], [sent.client for sent in group]
        link = self.links.get((first.key, where))
        if link is None or link.frame is None or not link.frame.fits(Frame(first.arrays)):
            link = self.make_link(f"{first.key}/{where}/{len(self.traffic)}", first.arrays)
        for (key, elsewhere), other in self.links.items():
            if key == first.key and elsewhere != where:  # a node holds one model of a record: the last it received
                for client in clients:
                    other.held.pop(client, None)
        self.links[first.key, where] = link
        round = link.open(first.arrays, clients)
        for sent in group:
            sent.link, sent.round = link, round

    def _enter(self, messages: list[Message], *, apart: bool = False) -> list[Open]:
        if any(SECAGG in message.content.config_records for message in messages):
            raise ConfigError(NO_SECAGG)
        if not messages:  # a round that only evaluates, fraction_train=0.0
            return []
        with self._lock:
            if any(not self._announced[message.metadata.dst_node_id] for message in messages):
                phase = messages[0].metadata.message_type.partition(".")[0]
                nodes = [(message.metadata.dst_node_id, message.content.array_records) for message in messages]
                self.announce(phase, nodes, apart=apart)
            phases = self.traffic[-1:]
            entries = [Open(m, self._announced[m.metadata.dst_node_id].popleft(), phases[0]) for m in messages]
            self.open += entries
            phases[0].clients += [message.metadata.dst_node_id for message in messages]
            return entries

    def _send(self, entry: Open) -> str:
        self._encode(entry)
        ids = [id for id in self.grid.push_messages([entry.message]) if id]  # none: Flower has said why
        entry.id = entry.id or (ids[0] if ids else "")
        return entry.id

    def _encode(self, entry: Open) -> None:
        records: dict[str, Any] = dict(entry.message.content.items())
        for name, sent in entry.models.items():
            plain, payload = _size(sent.record), None
            try:
                if sent.link is not None:
                    payload = sent.link.resend(sent.client) if entry.again else sent.link.message(sent.client)
            except QuantizationError as error:  # NaN in the server's own model; without us the app would go on, too
                reason = short(error).removeprefix(f"client {sent.client!r}: ")
                self._say_once(f"record {sent.key!r} cannot be coded and travels as it is: {reason}", WARNING)
                sent.link = None
            if payload is not None and len(payload) >= plain:
                self._say_once(f"record {sent.key!r} is not smaller when coded and travels as it is")
                sent.link, payload = None, None
            records[sent.key] = sent.record if payload is None else record_of(payload, name)
            entry.phase.down += plain if payload is None else len(payload)
            entry.phase.plain_down += 0 if entry.again else plain
        entry.phase.messages += 1
        entry.phase.resent += entry.again
        entry.message.content = RecordDict(records)

    def _say_once(self, text: str, level: int = INFO) -> None:
        if text not in self._said:
            self._said.add(text)
            log(level, "fedfp8: %s", text)

    # On the way in

    def _answer(self, reply: Message, entry: Open | None) -> Message | None:
        """A reply as the strategy expects it; None if the node lost its reference and is sent the whole model."""
        if entry is None:
            return reply
        if reply.has_content() and LOST in reply.content and not entry.again and entry.models:
            node = entry.message.metadata
            log(INFO, "fedfp8: node %d has lost its reference and is sent the whole model", node.dst_node_id)
            entry.message = Message(
                entry.message.content, node.dst_node_id, node.message_type, ttl=node.ttl, group_id=node.group_id
            )
            entry.again = True
            self._send(entry)
            return None
        answer = self._accepted(reply, entry)
        answer.metadata.__dict__["_reply_to_message_id"] = entry.id
        with self._lock:
            self.open.remove(entry)
            if not any(other.phase is entry.phase for other in self.open) and not any(self._announced.values()):
                log(INFO, "fedfp8: %s", entry.phase)
        return answer

    def _consistent(self, replies: list[Message], entries: list[Open]) -> list[Message]:
        train = bool(entries) and entries[0].phase.phase == "train"
        odd = {id(reply): reason for reply, reason in self.inner.odd_ones(replies, train)}
        by_id = {entry.id: entry for entry in entries}
        return [
            _rejection(by_id[reply.metadata.reply_to_message_id], WireFormatError(odd[id(reply)]))
            if id(reply) in odd
            else reply
            for reply in replies
        ]

    def _accepted(self, reply: Message, entry: Open) -> Message:
        """A reply with arrays in place of blobs; one that cannot be used becomes an error that says why."""
        node = entry.message.metadata.dst_node_id
        if reply.has_error():
            if not any(words in (reply.error.reason or "") for words in UNDECODED):
                return reply
            log(WARNING, "fedfp8: node %d failed: %s", node, HINT)
            reason = f"{HINT} ({short(reply.error.reason)})"
            return Message(Error(code=reply.error.code, reason=reason), reply_to=entry.message)
        try:
            reply.content = self._decoded(reply.content, entry)
            self.inner.check_weight(reply)
            if entry.phase.phase == "train":
                self.inner.check(reply, {sent.key: sent.views for sent in entry.models.values()})
        except Exception as error:  # whatever it is: the sender's fault costs the sender's update, never the run
            return _rejection(entry, error)
        return reply

    def _decoded(self, content: RecordDict, entry: Open) -> RecordDict:
        if LOST in content:
            raise WireFormatError("it asked for the whole model and then for the same again")
        records: dict[str, Any] = dict(content.items())
        left = dict(entry.models)
        for key, record in content.array_records.items():
            entry.phase.up += _size(record)
            blobs, others = split(record)
            arrays: dict[str, Array] = {}
            for name, payload in blobs.items():
                sent = left.pop(name, None)
                if sent is None or sent.link is None:
                    raise WireFormatError(f"a model under the name {name!r}, which was not sent or is answered already")
                arrays |= {n: array_of(array) for n, array in self._received(sent, payload, entry, key).items()}
            _check_plain(others, entry.models, any_shape=not self.inner.aggregated_by_flower)
            records[key] = ArrayRecord(arrays | others) if blobs else record
            entry.phase.plain_up += _size(records[key])
        for sent in entry.models.values():
            if sent.link is not None and sent.link.round is sent.round:
                sent.link.confirm(sent.client)
        return RecordDict(records)

    def _received(self, sent: Sent, payload: bytes, entry: Open, key: str) -> dict[str, np.ndarray]:
        assert sent.link is not None
        if sent.link.round is not sent.round or sent.round is None:
            raise WireFormatError("the reply came after the next round had begun")
        state = sent.round.receive(sent.client, payload)
        if self.keeps_states:
            self.states.setdefault(entry.id, {})[key] = state
        assert sent.link.frame is not None
        return sent.link.frame.restore(tensors_of(state))

    # The rest of a Grid is the network's

    def get_node_ids(self) -> Iterable[int]:
        return self.grid.get_node_ids()

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        return self.grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.grid.create_message(*args, **kwargs)

    def get_nodes(self) -> Any:
        return self.grid.get_nodes()

    def __getattr__(self, name: str) -> Any:
        if name == "grid":
            raise AttributeError(name)
        return getattr(self.grid, name)


def _rejection(entry: Open, error: Exception) -> Message:
    node, kind = entry.message.metadata.dst_node_id, type(error).__name__
    reason = short(error) if isinstance(error, Fedfp8Error) else f"{kind}: {short(error)}"
    log(WARNING, "fedfp8: the update of node %d is rejected: %s", node, reason)
    entry.phase.rejected.append({"client": node, "reason": reason})
    reason = f"fedfp8 rejected the update of node {node}: {reason}"
    answer = Message(Error(code=REJECTED, reason=reason), reply_to=entry.message)
    answer.metadata.__dict__["_reply_to_message_id"] = entry.id
    return answer


def _size(record: ArrayRecord) -> int:
    return sum(len(array.data) for array in record.values())


def _equal(one: ArrayRecord, other: ArrayRecord) -> bool:
    """Whether two records hold the same model; in most strategies they are one object."""
    return one is other or (
        list(one) == list(other) and all(a.data == b.data for a, b in zip(one.values(), other.values(), strict=True))
    )


def _check_plain(arrays: dict[str, Array], models: dict[str, Sent], any_shape: bool) -> None:
    """Arrays that came uncoded: of the shape they were sent in, if they were, and finite where they are floats.

    any_shape: a strategy that aggregates by itself may want other shapes, of pruned or growing layers.
    """
    for name, array in arrays.items():
        if array.stype != "numpy.ndarray":
            continue  # bytes of the app's own: the strategy knows what to do with them, or does not
        values = numpy_view(name, array)
        was = next((sent.arrays[name] for sent in models.values() if name in sent.arrays), None)
        if was is not None and was.shape != values.shape and not any_shape:
            raise WireFormatError(f"array {name!r} is {values.shape} and was sent as {was.shape}")
        if values.dtype.kind in "fc" and not bool(np.isfinite(values).all()):
            same = was is not None and np.array_equal(values, was, equal_nan=True)
            if not same:
                raise WireFormatError(f"array {name!r} of the update holds NaN or Inf; the update is not usable")
