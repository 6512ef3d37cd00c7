"""Small torch towers of common kinds; `ITEMS` is their padding."""

import torch
from torch import Tensor, nn

from precompute.adapters.torch_export import BoundTower, Example

ITEMS, DIMS = 50, 8
HISTORY = torch.zeros(2, 5, dtype=torch.int64)
INDEX = torch.tensor([0, 1])


class Mean(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS + 1, DIMS, padding_idx=ITEMS)

    def forward(self, history: Tensor) -> Tensor:
        real = (history != ITEMS).float().unsqueeze(-1)
        return (self.table(history) * real).sum(1) / real.sum(1).clamp(min=1)


class Gru(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIMS, DIMS, batch_first=True)

    def forward(self, history: Tensor) -> Tensor:
        states, _ = self.gru(self.table(history))
        last = (history != ITEMS).sum(1).clamp(min=1) - 1
        return states[torch.arange(history.shape[0]), last]


class Transformer(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, DIMS)
        layer = nn.TransformerEncoderLayer(DIMS, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, history: Tensor) -> Tensor:
        rows = self.table(history) + self.positions(torch.arange(history.shape[1]))
        padding = history == ITEMS
        states = self.encoder(rows, src_key_padding_mask=padding)
        real = (~padding).float().unsqueeze(-1)
        return (states * real).sum(1) / real.sum(1)


class Featured(Mean):
    """history, country int64 [n], sizes float32 [n, 3] -> vector of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.countries = nn.Embedding(5, 4)
        self.layers = nn.Sequential(
            nn.Linear(DIMS + 7, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, DIMS)
        )

    def forward(  # type: ignore[override]
        self, history: Tensor, country: Tensor, sizes: Tensor
    ) -> Tensor:
        parts = [super().forward(history), self.countries(country), sizes]
        return nn.functional.normalize(self.layers(torch.cat(parts, 1)), dim=1)


class Items(nn.Module):  # type: ignore[misc]
    def __init__(self, dims: int = DIMS) -> None:
        super().__init__()
        self.table = nn.Embedding(ITEMS, dims)

    def forward(self, item: Tensor) -> Tensor:
        return self.table(item)


def example(**features: Tensor) -> Example:
    """Return an example of a history and features."""
    return Example({"history": HISTORY, **features}, {"item": INDEX}, pad=ITEMS, max_length=40)


class Priced(nn.Module):  # type: ignore[misc]
    """An item tower over a price alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(1, DIMS)

    def forward(self, price: Tensor) -> Tensor:
        return self.weights(price[:, None])


def bound(module: nn.Module, export_example: Example | None = None) -> BoundTower:
    """Prepare the module for an import, as the user tower."""
    export_example = export_example or example()
    return BoundTower(module.eval(), export_example.user, export_example, ITEMS, "the user tower")


class TasteAndCountry(nn.Module):  # type: ignore[misc]
    """Mean of a history's groups, and a country's own taste."""

    def __init__(self) -> None:
        super().__init__()
        groups = torch.eye(5)[torch.arange(ITEMS + 1) % 5]
        self.items = nn.Embedding.from_pretrained(groups)
        self.countries = nn.Embedding.from_pretrained(torch.eye(5)[:3] * 0.1)

    def forward(self, history: Tensor, country: Tensor) -> Tensor:
        real = (history != ITEMS).float().unsqueeze(-1)
        mean = (self.items(history) * real).sum(1) / real.sum(1).clamp(min=1)
        return mean + self.countries(country)


class Country(nn.Module):  # type: ignore[misc]
    """The taste of a country alone."""

    def __init__(self) -> None:
        super().__init__()
        self.countries = nn.Embedding.from_pretrained(torch.eye(5))

    def forward(self, country: Tensor) -> Tensor:
        return self.countries(country)
