"""GPUs that were measured: their rates as a table, and what a night would take on one of them.

Imports neither torch nor numpy, and answers in microseconds. The numbers of `CARDS` are those of `tests/bench/results`:
after a bench of a GPU, `python -m tests.bench.device.card_table` prints the table that its results make.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cache.errors import ConfigError

MEASURED_ITEMS = 1_000_000
MEASURED_K = 100
DEFAULT_CARD = "h200"
"""The card that a plan goes by where no GPU can be tried and none was named."""


@dataclass(frozen=True, slots=True)
class ListCost:
    """What one user's list cost with a million items of so many dimensions, K = 100, history excluded."""

    dims: int
    users_per_s: int
    item_share: float
    """Share of a list's time that grows with the number of items; the rest is the same for each user."""

    @property
    def growing_s(self) -> float:
        """Seconds of a list that are spent on a million items."""
        return self.item_share / self.users_per_s

    @property
    def steady_s(self) -> float:
        """Seconds of a list that no number of items changes."""
        return (1 - self.item_share) / self.users_per_s


@dataclass(frozen=True, slots=True)
class ShardCost:
    """What the steps of a night up to its pages cost with such a card and so many processor cores."""

    users_per_s: int
    """From the partition to pages on disk; overlaps with the lists, which may be what limits it."""
    begin_users_per_s: int
    """Sources pinned, read and partitioned."""
    embed_numbers_per_s: int
    """Item vectors: items by their dimensions."""
    cores: int
    interactions_per_user: int


@dataclass(frozen=True, slots=True)
class CardForecast:
    """Seconds of a night's scoring on a card; None for what was not measured on it."""

    card: str
    users: int
    items: int
    dims: int
    k: int
    users_per_s: float
    topk_s: float
    begin_s: float | None
    embed_s: float | None
    pages_s: float | None
    """From the partition to pages, the lists included."""
    notes: tuple[str, ...]

    @property
    def night_s(self) -> float | None:
        """From the sources to the pages of all users; None if those steps were not measured on this card."""
        if self.begin_s is None or self.embed_s is None or self.pages_s is None:
            return None
        return self.begin_s + self.embed_s + self.pages_s


@dataclass(frozen=True, slots=True)
class Card:
    """Rates of one kind of GPU, as they were measured."""

    name: str
    lists: tuple[ListCost, ListCost]
    """With few dimensions and with many: other numbers of them lie on the line through both."""
    shard: ShardCost | None = None

    def list_seconds(self, items: int, dims: int) -> float:
        """Seconds of one user's list: a part that grows with items and one that does not, each on a line by dims."""
        low_dims_cost, high_dims_cost = self.lists
        reach = (dims - low_dims_cost.dims) / (high_dims_cost.dims - low_dims_cost.dims)
        by_items = (
            _on_line(low_dims_cost.growing_s, high_dims_cost.growing_s, reach)
            * items
            / MEASURED_ITEMS
        )
        return by_items + _on_line(low_dims_cost.steady_s, high_dims_cost.steady_s, reach)

    def night(self, users: int, items: int, dims: int, k: int) -> CardForecast:
        """Forecast of the lists, and of the steps up to their pages where those were measured."""
        topk_s = users * self.list_seconds(items, dims)
        shard = self.shard
        return CardForecast(
            self.name, users, items, dims, k, users / topk_s, topk_s,
            None if shard is None else users / shard.begin_users_per_s,
            None if shard is None else items * dims / shard.embed_numbers_per_s,
            None if shard is None else max(users / shard.users_per_s, topk_s),
            self._notes(items, dims, k),
        )  # fmt: skip

    def how(self, k: int) -> str:
        """The row of the table that a rate comes from, in words."""
        low_dims_cost = self.lists[0]
        text = (
            f"one {self.name} did {low_dims_cost.users_per_s:,} users/s with {MEASURED_ITEMS:,} items of "
            f"{low_dims_cost.dims}, "
            f"K = {MEASURED_K}"
        )
        return text if k == MEASURED_K else f"{text} (not {k})"

    def _notes(self, items: int, dims: int, k: int) -> tuple[str, ...]:
        low_dims_cost, high_dims_cost = self.lists
        notes = [self.how(MEASURED_K)]
        if k != MEASURED_K:
            notes.append(f"lists of {k} were not measured: they count as lists of {MEASURED_K}")
        if not low_dims_cost.dims <= dims <= high_dims_cost.dims:
            notes.append(
                f"{dims} dimensions lie beyond the {low_dims_cost.dims} to {high_dims_cost.dims} that were measured"
            )
        if items != MEASURED_ITEMS:
            notes.append(
                f"{items:,} items are extrapolated from {MEASURED_ITEMS:,}: {low_dims_cost.item_share:.0%} of a list's "
                "time "
                "grows with them"
            )
        if self.shard is not None:
            notes.append(
                f"partition, item vectors and pages: with {self.shard.cores} cores and "
                f"{self.shard.interactions_per_user} interactions a user; assembling, index, load and checks, and "
                "compiling kernels for the first time, are not counted"
            )
        return tuple(notes)


def _on_line(first: float, second: float, reach: float) -> float:
    """Number on the line through two others, which lie at 0 and 1; at least a tenth of the first."""
    return max(first + reach * (second - first), first / 10)


CARDS: Mapping[str, Card] = {
    "h200": Card(
        "NVIDIA H200",
        (ListCost(128, 1_088_674, 0.8175), ListCost(256, 639_953, 0.802)),
        ShardCost(256_682, 57_837, 14_595_211, cores=16, interactions_per_user=16),
    ),
}
"""Measured cards by the name of their results' files."""


def find_card(name: str, cards: Mapping[str, Card] = CARDS) -> Card:
    """The card of a name, with or without the maker's, or with the first part of it where only one begins so.

    Raises ConfigError for others, with the known ones.
    """
    normalized_name = "-".join(name.lower().replace("-", " ").split()).removeprefix("nvidia-")
    if normalized_name in cards:
        return cards[normalized_name]
    longer = [
        card_name
        for card_name in cards
        if normalized_name and card_name.startswith(f"{normalized_name}-")
    ]
    if len(longer) == 1:
        return cards[longer[0]]
    raise ConfigError(
        f"there are no rates of a card {name!r}: measured were {', '.join(sorted(cards))} (a bench on another card is "
        "`make gpu`; without --card a GPU of this machine is tried)",
        card=name,
    )
