"""What a Flower client remembers between rounds: the last model it received, in ``Context.state``.

It is kept as a payload that needs no reference (a few bits a weight, not 32), one for each logical client of a node,
and dropped when the server has certainly forgotten it. Losing it costs bytes and nothing else: the server sends the
model once more without a reference.
"""

from flwr.app import Array, ArrayRecord, Context

from fedfp8.flower.blob import STYPE
from fedfp8.model.layout import Layout
from fedfp8.model.state import State, dequantize_state
from fedfp8.wire import decode

__all__ = ["ClientCache"]

RECORD = "fedfp8-received"


class ClientCache:
    """The models of one node's clients; name -> (payload, round) with the round in the Array's key."""

    def __init__(self, context: Context) -> None:
        self.records = context.state.array_records

    def get(self, client: str, layout: Layout | None) -> State | None:
        """The model `client` received last, if it is still there and of this layout."""
        for array in (a for key, a in self._entries().items() if key.rpartition("@")[0] == client):
            return dequantize_state(decode(array.data, layout))
        return None

    def put(self, client: str, payload: bytes, round: int, keep: int) -> None:
        """Keep `payload` for `client`; forget what any client received `keep` rounds ago or more."""
        entries = {
            key: array
            for key, array in self._entries().items()
            if key.rpartition("@")[0] != client and int(key.rpartition("@")[2]) > round - keep
        }
        entries[f"{client}@{round}"] = Array("uint8", (len(payload),), STYPE, payload)
        self.records[RECORD] = ArrayRecord(entries)

    def _entries(self) -> dict[str, Array]:
        return dict(self.records.get(RECORD, {}))
