"""Four filters that translate between FLARE's models (DXO) and the bytes of a link.

    server                                             client
    SendModel      model -> message     - - task - ->  ReceiveModel   message -> model
    ReceiveUpdate  message -> update    <- - result -  SendUpdate     model or difference -> message

A message is a DXO of one array of bytes. The two filters of a side share a link, which belongs to a job (`_Server`,
`_Client`). A client that lost its reference asks for the whole model at once, over FLARE's auxiliary messages, and the
task goes on. A result that cannot be used costs its sender the update and never the run.
"""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply

from fedfp8.errors import Fedfp8Error, LostReference, QuantizationError, RunError, WireFormatError
from fedfp8.link import ClientLink, ServerLink
from fedfp8.link.arrays import tensors_of, torch_of
from fedfp8.link.store import write_atomic
from fedfp8.model.state import Values
from fedfp8.text import size_text

__all__ = ["ReceiveModel", "ReceiveUpdate", "SendModel", "SendUpdate"]

MESSAGE = "fedfp8"  # the only entry of a DXO that holds a message; its meta entry says what the message stands for
TOPIC = "fedfp8.whole"  # of a client's request to be sent the whole model
ATTEMPTS, TIMEOUT = 3, 120.0  # of that request, and seconds for each
WAYS = "down", "up", "resent", "beside"  # what is counted; beside: arrays in the meta of a DXO, as Scaffold has them
HEAD = 128  # bytes that an array costs beside its values: FLARE uses np.save
NOTHING = (
    "no model of this job passed the filters, nothing was saved; are they on the tasks that carry it? "
    'add_to(recipe, tasks=["..."])'
)
_DXO = "DXO"  # where a Shareable has it
KINDS = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]

# What the two filters of a side share. They are separate objects, so it is kept here, by engine (that is by process,
# and in the simulator by client) and job.

_shared: WeakKeyDictionary[Any, dict[tuple[str, str], Any]] = WeakKeyDictionary()
_lock = threading.RLock()


def _of_job(fl_ctx: FLContext, name: str, make: Callable[[], Any] | None = None) -> Any:
    """The object `name` of this job; made if there is none yet. None if there is none and nothing makes it."""
    with _lock:
        jobs = _shared.setdefault(fl_ctx.get_engine(), {})
        key = fl_ctx.get_job_id(), name
        if key not in jobs and make is not None:
            jobs[key] = make()
        return jobs.get(key)


def _forget(fl_ctx: FLContext, name: str) -> None:
    with _lock:
        _shared.get(fl_ctx.get_engine(), {}).pop((fl_ctx.get_job_id(), name), None)


def _run_folder(fl_ctx: FLContext) -> Path:
    return Path(fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id()))


def _peer(fl_ctx: FLContext) -> str:
    return fl_ctx.get_peer_context().get_identity_name()


def _array(message: bytes, kind: str = "numpy") -> Any:
    """A message as what FLARE carries: an array like those of the model, so that streaming finds what it expects."""
    array = np.frombuffer(bytearray(message), np.uint8)
    return array if kind == "numpy" else torch.from_numpy(array)


def _bytes(array: Any) -> bytes:
    """The message in a DXO. It came over a network: it may be anything."""
    values = array.numpy() if isinstance(array, torch.Tensor) else array
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.ndim != 1:
        raise WireFormatError(f"a message is an array of bytes (uint8); this is a {type(array).__name__}")
    return values.tobytes()


def _size(values: Any) -> int:
    """Bytes of the arrays in the meta of a DXO, which hold whatever FLARE or a script put there."""
    if isinstance(values, dict):
        return sum(map(_size, values.values()))
    return int(values.nbytes) if isinstance(values, np.ndarray | torch.Tensor) else 0


def _with_data(dxo: DXO, data: dict[str, Any], kind: str = "", **meta: Any) -> DXO:
    """A new DXO: the one given may be shared with other clients."""
    kept = {key: value for key, value in dxo.meta.items() if key != MESSAGE}
    return DXO(kind or dxo.data_kind, data, kept | meta)


# The server


class _Server:
    """One job's link, and which task its open round belongs to."""

    def __init__(self, wire: str, clients: int, settings: Mapping[str, Any]) -> None:
        self.make = lambda: ServerLink(wire, **settings)
        self.link = self.make()
        self.clients = clients
        self.task: tuple[Any, ...] = ()
        self.coded: set[str] = set()  # clients that were sent a message last: they must answer with one
        self.answered: set[str] = set()  # in this round
        self.accepted: set[str] = set()
        self.kind = ""  # what is handed on in this round, models or changes: an average must not mix them
        self.rows: list[dict[str, Any]] = []  # of each round: bytes by client, and of the model as FLARE would send it
        self.lock = threading.RLock()

    def message(self, client: str, task: tuple[Any, ...], arrays: Mapping[str, Any], connected: int) -> bytes:
        """What to send to a client; nothing if the model is smaller as it is. Asked again, the same."""
        with self.lock:
            self.coded.discard(client)  # until there is a message
            model = next(iter(arrays.values()))  # of one task all clients are given the same arrays
            if self.link.round is None or self.task[:-1] != task or self.task[-1] is not model:
                self._open(client, arrays, self.clients or connected)
                self.task = *task, model
            self.link.join(client)
            message = self.link.message(client)
            plain = self.rows[-1]["plain"]
            if len(message) >= plain + HEAD * (len(arrays) - 1):  # a message is one array
                self.count("down", client, plain)
                return b""
            self.count("down", client, len(message))
            self.coded.add(client)
            return message

    def _open(self, client: str, arrays: Mapping[str, Any], expected: int) -> None:
        self.task, self.answered, self.accepted, self.kind = (), set(), set(), ""
        try:
            self.link.open(_as_before(self.link, arrays), [client], expected=expected)
        except QuantizationError:  # other tensors than in the rounds before, as after `exclude_vars`
            if self.link.frame is None:
                raise
            self.link = self.make()
            self.link.open(arrays, [client], expected=expected)
        plain = sum(torch_of(name, array).nbytes for name, array in arrays.items())
        ways: dict[str, Any] = {way: {} for way in WAYS}
        self.rows.append({"round": len(self.rows) + 1, "plain": plain} | ways)

    def count(self, way: str, client: str, size: int) -> None:
        with self.lock:
            if size and self.rows:
                self.rows[-1][way][client] = self.rows[-1][way].get(client, 0) + size

    def whole(self, client: str) -> bytes:
        with self.lock:
            message = self.link.resend(client)
            self.count("resent", client, len(message))
            return message

    def update(self, client: str, reply: bytes, kind: str) -> DXO:
        """What a client brings, in the server's frame: a model, or the change it made to the one it received."""
        with self.lock:
            self.count("up", client, len(reply))
            update = self.link.receive(client, reply)
            self.kind = self.kind or kind
            self.accepted.add(client)
            if self.kind == DataKind.WEIGHT_DIFF:
                round = self.link.round
                assert round is not None
                update = self._less(update, round.model if round.wires[client].preserve else round.sent(client))
            return DXO(self.kind, update)

    def answers(self, client: str) -> bool:
        """Whether a result of this client must be a message."""
        with self.lock:
            if self.link.round is not None and client in self.link.round.places:
                self.answered.add(client)
            return client in self.coded

    def nothing(self, kind: str) -> DXO:
        """In place of a result that cannot be used: no data, which FLARE leaves out.

        But the model as it is from the last client of a round if no other brought anything: FLARE would go on with no
        model at all.
        """
        with self.lock:
            round = self.link.round
            if round is None or self.link.frame is None or self.accepted or len(self.answered) < round.cohort:
                return DXO(kind, {})
            model = self.link.frame.restore(tensors_of(round.model))
            return DXO(kind, self._less(model, round.model) if kind == DataKind.WEIGHT_DIFF else model)

    def _less(self, arrays: dict[str, Any], state: Values) -> dict[str, Any]:
        assert self.link.frame is not None
        before = self.link.frame.restore(tensors_of(state))
        return {name: array - before[name] for name, array in arrays.items()}

    def traffic(self) -> str:
        """What the run cost, and what plain FLARE would have."""
        sums = {way: sum(sum(row[way].values()) for row in self.rows) for way in WAYS}
        plain = sum(row["plain"] * (len(row["down"]) + len(row["up"])) for row in self.rows) + sums["beside"]
        sent = sum(sums.values())
        less = f" instead of {size_text(plain)} ({plain / sent:.1f} times less)" if sent < plain else ""
        beside = f"; {size_text(sums['beside'])} of it are arrays beside the model, which are not coded"
        return f"{size_text(sent)}{less} in {len(self.rows)} rounds{beside if sums['beside'] else ''}"


def _as_before(link: ServerLink, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """`arrays` in the dtypes of the first round: a mean turns counters into floats."""
    kinds = {} if link.frame is None else link.frame.kinds
    return {name: _cast(array, kinds[name]) if name in kinds else array for name, array in arrays.items()}


def _cast(array: Any, kind: Any) -> Any:
    """To the dtype of `kind` (of a Frame); whole numbers are rounded, since 2.9999999 is a 3 that was averaged."""
    if isinstance(array, torch.Tensor) and isinstance(kind, tuple):
        return (array if kind[0].is_floating_point or not array.is_floating_point() else array.round()).to(kind[0])
    if isinstance(array, torch.Tensor) or isinstance(kind, tuple):
        return array
    values = np.asarray(array)
    return (np.rint(values) if kind.kind in "iu" and values.dtype.kind == "f" else values).astype(kind, copy=False)


class SendModel(DXOFilter):
    """Server, task data: the model becomes a message, coded given what the client holds.

    wire, settings: as of `fedfp8.ServerLink`. clients: how many answer in a round; 0: all that are connected.
    """

    def __init__(self, wire: str = "dq", clients: int = 0, settings: dict[str, Any] | None = None) -> None:
        super().__init__([DataKind.WEIGHTS], None)
        self.wire, self.clients, self.settings = wire, clients, settings or {}
        ServerLink(wire, **self.settings)  # bad settings are reported where they are given

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        client, engine = _peer(fl_ctx), fl_ctx.get_engine()
        header = shareable.get_header
        task = header(ReservedHeaderKey.TASK_NAME), header("current_round"), header(ReservedHeaderKey.MSG_ROOT_ID)
        try:
            server = _of_job(fl_ctx, "server", lambda: self._start(engine))
            message = server.message(client, task, dxo.data, len(engine.get_clients()))
            server.count("beside", client, _size(dxo.meta))
        except Exception as error:  # raised here it would cancel the task for all clients
            self.log_error(fl_ctx, f"fedfp8: client {client!r} is sent the model as it is, uncoded: {error}")
            return None
        if not message:
            self.log_info(fl_ctx, "fedfp8: the model is not smaller when coded and is sent as it is")
            return None
        kind = "torch" if isinstance(next(iter(dxo.data.values())), torch.Tensor) else "numpy"
        return _with_data(dxo, {MESSAGE: _array(message, kind)}, **{MESSAGE: kind})

    def _start(self, engine: Any) -> _Server:
        try:
            engine.register_aux_message_handler(topic=TOPIC, message_handle_func=_send_whole)
        except ValueError:  # already there
            pass
        return _Server(self.wire, self.clients, self.settings)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.END_RUN:
            return
        if (server := _of_job(fl_ctx, "server")) is None:
            self.log_warning(fl_ctx, f"fedfp8: {NOTHING}")
        else:
            self.log_info(fl_ctx, f"fedfp8: {server.traffic()}")
            write_atomic(_run_folder(fl_ctx) / "fedfp8-traffic.json", json.dumps(server.rows, indent=1).encode())
            _forget(fl_ctx, "server")


def _send_whole(topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
    """The server's answer to a client that lost its reference."""
    try:
        reply = make_reply(ReturnCode.OK)
        reply[MESSAGE] = _array(_of_job(fl_ctx, "server").whole(_peer(fl_ctx)))
        return reply
    except (Fedfp8Error, AttributeError):  # no such job or client in this round
        return make_reply(ReturnCode.BAD_REQUEST_DATA)


class ReceiveUpdate(DXOFilter):
    """Server, task result: a message becomes the client's update, or its difference, in the server's frame."""

    def __init__(self) -> None:
        super().__init__(KINDS, None)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        client, server = _peer(fl_ctx), _of_job(fl_ctx, "server")
        if server is None or not server.answers(client):
            return shareable  # what was sent plain may come back plain
        content = shareable.get(_DXO)
        kind = content.get("kind") if isinstance(content, dict) else None
        if shareable.get_return_code() != ReturnCode.OK or kind == DataKind.METRICS:
            return shareable
        if kind not in KINDS:  # FLARE would average the arrays of any kind
            text = f"client {client!r}: the result is {str(kind)[:80]!r}; a model or a difference was expected"
            return self._left_out(text, server.nothing(DataKind.WEIGHTS), fl_ctx).update_shareable(shareable)
        return super().process(shareable, fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        client, server = _peer(fl_ctx), _of_job(fl_ctx, "server")
        try:
            if (reason := dxo.get_meta_prop(MESSAGE)) is not None:
                raise WireFormatError(f"the client could not send its update: {str(reason)[:300]!r}")
            server.count("beside", client, _size(dxo.meta))
            if list(dxo.data) != [MESSAGE]:
                raise WireFormatError("the result is no message of fedfp8; SendUpdate must be the client's last filter")
            update = server.update(client, _bytes(dxo.data[MESSAGE]), dxo.data_kind)
            return _with_data(dxo, update.data, update.data_kind)
        except Exception as error:
            text = str(error) if f"{client!r}" in str(error) else f"client {client!r}: {error}"
            return self._left_out(text, server.nothing(dxo.data_kind), fl_ctx)

    def _left_out(self, text: str, instead: DXO, fl_ctx: FLContext) -> DXO:
        self.log_error(fl_ctx, f"fedfp8: an update is left out; {text}")
        return instead


# The client


class _Client:
    """One job's link on a site; what it holds is a file, since the next task may find another process."""

    def __init__(self, fl_ctx: FLContext) -> None:
        self.link = ClientLink(store=_run_folder(fl_ctx) / "fedfp8" / fl_ctx.get_identity_name())
        self.coded = False  # whether the model of this task came as a message


def _client(fl_ctx: FLContext) -> _Client:
    return _of_job(fl_ctx, f"client {fl_ctx.get_identity_name()}", lambda: _Client(fl_ctx))


class ReceiveModel(DXOFilter):
    """Client, task data: a message becomes the model."""

    def __init__(self) -> None:
        super().__init__([DataKind.WEIGHTS], None)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        client = _client(fl_ctx)
        client.coded = MESSAGE in dxo.data
        if not client.coded:
            return None
        client.link.arrays = "torch" if dxo.get_meta_prop(MESSAGE) == "torch" else "numpy"
        try:
            model = client.link.receive(_bytes(dxo.data[MESSAGE]))
        except LostReference:
            self.log_warning(fl_ctx, "fedfp8: the model this one is coded given is not here; asking for it whole")
            model = client.link.receive(self._whole(fl_ctx))
        return _with_data(dxo, model)

    def _whole(self, fl_ctx: FLContext) -> bytes:
        for _ in range(ATTEMPTS):
            replies = fl_ctx.get_engine().send_aux_request(None, TOPIC, Shareable(), TIMEOUT, fl_ctx)
            for reply in replies.values():
                if reply.get_return_code() == ReturnCode.OK and MESSAGE in reply:
                    return _bytes(reply[MESSAGE])
        raise RunError(f"the server did not send the whole model in {ATTEMPTS} attempts; the task cannot be done")


class SendUpdate(DXOFilter):
    """Client, task result: a model, or the difference to the one received, becomes a message."""

    def __init__(self) -> None:
        super().__init__(KINDS, None)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        client = _client(fl_ctx)
        if not client.coded:
            return None
        try:
            arrays = dxo.data
            if dxo.data_kind == DataKind.WEIGHT_DIFF:
                arrays = _sum(client.link, arrays)
            return _with_data(dxo, {MESSAGE: _array(client.link.reply(arrays), client.link.arrays)})
        except Exception as error:  # raised here it could end the run
            self.log_error(fl_ctx, f"fedfp8: this update cannot be sent and is left out: {error}")
            return _with_data(dxo, {MESSAGE: _array(b"\0", client.link.arrays)}, **{MESSAGE: str(error)})


def _sum(link: ClientLink, changes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The client's model from its difference to the one received."""
    assert link.held is not None
    held = tensors_of(link.held)
    return {n: held[n] + torch_of(n, change) if n in held else torch_of(n, change) for n, change in changes.items()}
