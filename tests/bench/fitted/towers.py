"""Towers of plain torch, fitted by next items: the mean of a history, a GRU, and self-attention like SASRec's."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from precompute.adapters.folder import ImportReport
from precompute.adapters.torch_export import Example
from precompute.adapters.torch_towers import from_torch
from tests.bench.fitted.cut import ITEMS, Cut
from tests.bench.fitted.fitted import Fitted

DIMS, LENGTH, BATCH = 32, 50, 256


class Mean(nn.Module):  # type: ignore[misc]  # torch's own types are not looked at
    """Mean of the rows of a history, through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS + 1, DIMS, padding_idx=ITEMS)
        self.layers = nn.Sequential(nn.Linear(DIMS, 2 * DIMS), nn.ReLU(), nn.Linear(2 * DIMS, DIMS))

    def forward(self, history: Tensor) -> Tensor:
        """Vectors [n, DIMS] of histories [n, length], padded with ITEMS."""
        real = (history != ITEMS).float().unsqueeze(-1)
        return self.layers((self.table(history) * real).sum(1) / real.sum(1).clamp(min=1))


class Recurrent(nn.Module):  # type: ignore[misc]
    """State of a GRU at the last item, as in GRU4Rec (Hidasi et al., ICLR 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS + 1, DIMS, padding_idx=ITEMS)
        self.gru = nn.GRU(DIMS, DIMS, batch_first=True)

    def forward(self, history: Tensor) -> Tensor:
        """Vectors [n, DIMS] of histories [n, length], padded with ITEMS."""
        states, _ = self.gru(self.table(history))
        last = (history != ITEMS).sum(1).clamp(min=1) - 1
        return states[torch.arange(history.shape[0]), last]


class Attentive(nn.Module):  # type: ignore[misc]
    """Causal self-attention at the last item, as in SASRec (Kang and McAuley, ICDM 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS + 1, DIMS, padding_idx=ITEMS)
        self.position_embedding = nn.Embedding(LENGTH, DIMS)
        layer = nn.TransformerEncoderLayer(DIMS, 2, 2 * DIMS, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, history: Tensor) -> Tensor:
        """Vectors [n, DIMS] of histories [n, length up to LENGTH], padded with ITEMS."""
        positions = torch.arange(history.shape[1])
        states = self.encoder(
            self.table(history) + self.position_embedding(positions),
            mask=positions[:, None] < positions[None, :],
            is_causal=False,
        )
        last = (history != ITEMS).sum(1).clamp(min=1) - 1
        return states[torch.arange(history.shape[0]), last]


def mean(cut: Cut) -> Fitted:
    """Two towers: the mean of a history, and a table of items."""
    return _fitted(Mean, cut, steps=600)


def gru(cut: Cut) -> Fitted:
    """GRU over the last 50 items."""
    return _fitted(Recurrent, cut, steps=500)


def attention(cut: Cut) -> Fitted:
    """Self-attention over the last 50 items."""
    return _fitted(Attentive, cut, steps=400)


def _fitted(kind: type[nn.Module], cut: Cut, *, steps: int) -> Fitted:
    """Fit by cross-entropy of the next item among all, one position of each history at a time."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    tower, items = kind(), nn.Embedding(ITEMS, DIMS)
    optimizer = torch.optim.Adam([*tower.parameters(), *items.parameters()], lr=5e-3)
    for _ in range(steps):
        users = rng.integers(len(cut.histories), size=BATCH)
        preceding_items, after = np.full((BATCH, LENGTH), ITEMS), np.empty(BATCH, np.int64)
        for row, history in enumerate(cut.histories[user] for user in users):
            at = rng.integers(1, len(history))
            recent_items = history[max(0, at - LENGTH) : at]
            preceding_items[row, : len(recent_items)], after[row] = recent_items, history[at]
        scores = tower(torch.from_numpy(preceding_items)) @ items.weight.T
        loss = nn.functional.cross_entropy(scores, torch.from_numpy(after))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tower.eval(), items.eval()

    def put(to: Path) -> ImportReport:
        example = Example(
            {"history": torch.zeros(2, 5, dtype=torch.int64)}, {"item": torch.tensor([0, 1])},
            pad=ITEMS, max_length=LENGTH,
        )  # fmt: skip
        with TemporaryDirectory() as folder:  # a table, since a matrix has no order
            clicks = cut.write(Path(folder) / "clicks.csv")
            return from_torch(
                tower, items, example, to=to, item_ids=range(ITEMS), clicks=clicks
            )  # fmt: skip

    def lists() -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        with torch.no_grad():
            history = torch.from_numpy(cut.padded(cut.evaluated_users, LENGTH, ITEMS))
            return cut.rank_items((tower(history) @ items.weight.T).numpy())

    return Fitted(put, lists)
