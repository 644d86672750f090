"""What a Flower client remembers between rounds: the models it received on its last visits, in ``Context.state``.

They are kept as payloads that need no reference (a few bits a weight, not 32), for each logical client of a node, and
dropped when the server has certainly forgotten them. Losing it costs bytes and nothing else: the server sends the
model once more without a reference.
"""

from contextlib import suppress

from flwr.app import Array, ArrayRecord, Context

from fedfp8.errors import Fedfp8Error
from fedfp8.flower.blob import array_of_blob
from fedfp8.link.store import narrow_codes
from fedfp8.model.layout import Layout
from fedfp8.model.quantized import Remade
from fedfp8.model.state import Values
from fedfp8.wire import decode

__all__ = ["ClientCache"]

RECORD = "fedfp8-received"


class ClientCache:
    """The models of one node's clients; name -> (payload, round) with the round in the Array's key."""

    def __init__(self, context: Context) -> None:
        self.records = context.state.array_records

    def get(self, client: str, layout: Layout | None) -> list[Values]:
        """The models of `client`, newest first, as far as they are still there and of this layout."""
        entries, found = self._entries(), list[Values]()
        for key in self._keys(entries, client):
            with suppress(Fedfp8Error):  # damaged, or of another run's model: as good as lost
                found.append(Remade(narrow_codes(decode(entries[key].data, layout))))
        return found

    def put(self, client: str, payload: bytes, round: int, *, kept: int, rounds: int) -> None:
        """Keep the newest `kept` payloads of `client`; forget what any client received `rounds` rounds ago or more."""
        entries = {key: array for key, array in self._entries().items() if _round(key) > round - rounds}
        entries[f"{client}@{round}"] = array_of_blob(payload)
        for key in self._keys(entries, client)[kept:]:
            del entries[key]
        self.records[RECORD] = ArrayRecord(entries)

    def _entries(self) -> dict[str, Array]:
        return dict(self.records.get(RECORD, {}))

    @staticmethod
    def _keys(entries: dict[str, Array], client: str) -> list[str]:
        """Of a client's models, newest first."""
        return sorted((key for key in entries if key.rpartition("@")[0] == client), key=_round, reverse=True)


def _round(key: str) -> int:
    return int(key.rpartition("@")[2])
