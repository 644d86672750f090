"""Next character: an Embedding and an LSTM on lines of Shakespeare, a speaker a client (LEAF's task, very small)."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import fedfp8

SPEAKERS = [
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows",
    "Tomorrow, and tomorrow, and tomorrow, creeps in this petty pace from day to day, to the last syllable of time",
    "All the world's a stage, and all the men and women merely players: they have their exits and their entrances",
    "The quality of mercy is not strained, it droppeth as the gentle rain from heaven upon the place beneath",
]
UNSEEN = "If music be the food of love, play on; give me excess of it, that, surfeiting, the appetite may sicken"
ALPHABET = sorted(set("".join([*SPEAKERS, UNSEEN]).lower()))


class Windows(Dataset):  # type: ignore[type-arg]
    """Every window of `length` characters with the character that follows each of them; whole numbers throughout."""

    def __init__(self, text: str, length: int = 16) -> None:
        self.tokens = torch.tensor([ALPHABET.index(c) for c in text.lower()])
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) - self.length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[i : i + self.length], self.tokens[i + 1 : i + self.length + 1]


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 16)  # stays float, and so does the LSTM
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.head = nn.Linear(64, len(ALPHABET))  # trains in FP8

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean().item(), batch[1].numel()


if __name__ == "__main__":
    torch.manual_seed(0)
    config = fedfp8.preset("own", "dq", round__count=20, clients__fraction=1.0, local__lr=1.0, local__batch_size=10)
    clients = [Windows(text) for text in SPEAKERS]
    history = fedfp8.run(config, model=Speaker(), clients=clients, test=Windows(UNSEEN), loss=loss, metric=accuracy)
    print(f"accuracy {history.accuracy:.1%} for {history.summary['bytes_total']:,} bytes")
