"""The server's own models of the last rounds: what a client holds is rebuilt from them, not kept.

What a client received in round n follows from the server's model of that round and the client's place in it: quantized
with the same random bits it is the same model again, bit for bit. So a server remembers some models and two small
numbers a client, whatever the number of clients. The models are files: in a folder of a run, or a temporary one.
"""

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedfp8.errors import RunError
from fedfp8.link.store import read_state, write_state
from fedfp8.link.wire import Wire, steps_of
from fedfp8.model.frequencies import Frequencies, layout_of_frequencies
from fedfp8.model.layout import Layout
from fedfp8.model.quantized import QuantState, Remade, describe, quantize_as, quantize_state
from fedfp8.model.state import State, Values

__all__ = ["Entry", "History", "quantize_down"]


@dataclass(frozen=True)
class Entry:
    """A model that was sent: all that decides what a client at some place received."""

    number: int
    fingerprint: bytes
    cohort: int  # clients it was sent to: their number decides the steps
    strata: int


def quantize_down(model: State, entry: Entry, wire: Wire, place: int, root: int) -> QuantState:
    """The server's model as it is sent to a client at `place`."""
    state = model.with_layout(wire.layout_down(model.layout))
    return quantize_state(state, **_how(state, entry, wire, root, place))


def _how(state: State, entry: Entry, wire: Wire, root: int, place: int = 0) -> dict[str, Any]:
    return {
        "seed": wire.seed_down(root, entry.number),
        "rounding": wire.down,
        "step": steps_of(state, wire.down, wire.kappa_down_for(entry.cohort), wire.fan_in, wire.depth),
        "place": place if wire.has_places else 0,
        "strata": entry.strata if wire.has_places else 1,
        "together": wire.has_places,
        "frequencies": wire.as_frequencies,
    }


Key = tuple[int, Wire, int]  # number of a model, how and at which place it was sent


class History:
    """Models by number, in files; the newest is in memory, too."""

    def __init__(self, root: int, folder: Path | None = None) -> None:
        self.root = root  # of all seeds
        self.entries: dict[int, Entry] = {}
        self.folder = folder or Path(tempfile.mkdtemp(prefix="fedfp8-history-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        if folder is None:  # goes with this object, or with the process
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._newest: tuple[int, State] | None = None  # the model that was added last, in memory
        self._mapped: dict[int, State] = {}  # others that were asked for: files that the system reads where it must
        self._forms: dict[int, tuple[Layout, State]] = {}  # layouts of models, and these as frequencies, in files, too
        self._described: dict[tuple[int, Wire], QuantState] = {}  # what messages of a model say at every place
        self._sums: dict[Key, dict[str, int]] = {}  # what is known of the fingerprints of what was sent
        self._sent: dict[Key, State] = {}
        self._lock = threading.RLock()

    def path(self, number: int) -> Path:
        return self.folder / f"model-{number:08d}.safetensors"

    def add(self, number: int, model: State, cohort: int, strata: int) -> Entry:
        entry = Entry(number, model.quick_fingerprint, cohort, strata)
        with self._lock:
            self.entries[number] = entry
            write_state(self.path(number), model, sync=False)
            self._newest = number, model
        return entry

    def model(self, number: int) -> State:
        """RunError if its file is lost or damaged."""
        with self._lock:
            if self._newest is not None and self._newest[0] == number:
                return self._newest[1]
            if number not in self._mapped:
                if number not in self.entries:
                    raise RunError(f"model {number} is not in the history any more")
                self._mapped[number] = read_state(self.path(number), self.entries[number].fingerprint)
            return self._mapped[number]

    def quantized(self, number: int, wire: Wire, place: int) -> QuantState:
        """Model `number` as it is sent to a client at `place`."""
        with self._lock:
            return quantize_as(self._describe(number, wire, place), self._form_down(number, wire))

    def sent(self, number: int, wire: Wire, place: int) -> Values:
        """What a client at `place` was sent in the round of model `number`, in the form that travelled."""
        with self._lock:
            key = number, wire, place if wire.has_places else 0
            described, state = self._describe(number, wire, place), self._form_down(number, wire)
            if wire.has_places:  # others ask for other places: tensors are made when they are needed
                return Remade(described, state, self._sums.setdefault(key, {}))
            if key not in self._sent:
                while len(self._sent) >= 2:
                    self._sent.pop(next(iter(self._sent)))
                self._sent[key] = State(state.layout, dict(Remade(described, state)))
            return self._sent[key]

    def _model_down(self, number: int, wire: Wire) -> State:
        model = self.model(number)
        return model.with_layout(wire.layout_down(model.layout))

    def _form_down(self, number: int, wire: Wire) -> State:
        """The same as the tensors that travel; made once, since every message of many rounds asks for it."""
        if not wire.as_frequencies:
            return self._model_down(number, wire)
        if number not in self._forms:
            model = self.model(number)
            form = Frequencies(model)
            if form.layout == model.layout:
                return self._model_down(number, wire)
            self._forms[number] = model.layout, _mapped(State(form.layout, dict(form)))
            self._mapped.pop(number, None)  # it has served
        layout, state = self._forms[number]
        return state.with_layout(layout_of_frequencies(wire.layout_down(layout)))

    def _describe(self, number: int, wire: Wire, place: int) -> QuantState:
        if (number, wire) not in self._described:
            state = self._model_down(number, wire)
            q = describe(state, **_how(state, self.entries[number], wire, self.root))
            self._described[number, wire] = replace(q, rest={name: t.clone() for name, t in q.rest.items()})
        return replace(self._described[number, wire], place=place if wire.has_places else 0, codes={})

    def keep_only(self, numbers: Iterable[int]) -> None:
        """Forget the others. Their files go with `clean`, once nothing that was saved can need them."""
        kept = set(numbers)
        with self._lock:
            self.entries = {n: e for n, e in self.entries.items() if n in kept}
            self._mapped = {n: m for n, m in self._mapped.items() if n in kept}
            self._forms = {n: m for n, m in self._forms.items() if n in kept}
            self._sent = {}  # asked for again in another round, if at all
            self._described = {key: q for key, q in self._described.items() if key[0] in kept}
            self._sums = {key: sums for key, sums in self._sums.items() if key[0] in kept}

    def clean(self) -> None:
        files = {self.path(n).name for n in self.entries}
        for path in self.folder.iterdir():
            if path.name not in files:
                path.unlink(missing_ok=True)

    def size(self) -> int:
        """Bytes on disk."""
        models = sum(self.path(n).stat().st_size for n in self.entries if self.path(n).exists())
        return models + sum(tensor.nbytes for _, form in self._forms.values() for tensor in form.values())


def _mapped(state: State) -> State:
    """The same from a file, which has no name any more: it goes with the state, and no other process can meet it."""
    with tempfile.TemporaryDirectory(prefix="fedfp8-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "state.safetensors"
        write_state(path, state, sync=False)
        return read_state(path, state.quick_fingerprint)
