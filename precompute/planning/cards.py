"""Measured rates of GPUs, and forecasts of a night's time on one of them.

Imports neither torch nor numpy, so a forecast takes microseconds. The numbers of `CARDS` are from
`tests/bench/results`; after a benchmark on a GPU, `python -m tests.bench.device.card_table` prints the entries for its
results.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cache.errors import ConfigError

MEASURED_ITEMS = 1_000_000
MEASURED_K = 100
DEFAULT_CARD = "h200"
"""Card that a plan uses if no GPU can be measured and none is named."""


@dataclass(frozen=True, slots=True)
class ListCost:
    """Measured cost of one user's list: a million items of `dims` dimensions, K = 100, history excluded."""

    dims: int
    users_per_s: int
    item_share: float
    """Share of a list's time that grows with the number of items; the remaining time is constant."""

    @property
    def item_dependent_s(self) -> float:
        """Seconds of a list that are spent on a million items."""
        return self.item_share / self.users_per_s

    @property
    def constant_s(self) -> float:
        """Seconds of a list that do not depend on the number of items."""
        return (1 - self.item_share) / self.users_per_s


@dataclass(frozen=True, slots=True)
class ShardCost:
    """Measured cost of a night's steps up to its pages, with this card and `core_count` processor cores."""

    users_per_s: int
    """Users per second from the partition to pages on disk; overlaps with the lists, which may be slower."""
    begin_users_per_s: int
    """Users per second whose sources are pinned, read and partitioned."""
    embed_numbers_per_s: int
    """Numbers of item vectors (items times dimensions) embedded per second."""
    core_count: int
    interactions_per_user: int


@dataclass(frozen=True, slots=True)
class CardForecast:
    """Seconds of a night's scoring on a card; None for steps not measured on that card."""

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
    """Seconds from the partition to pages, lists included."""
    notes: tuple[str, ...]

    @property
    def night_s(self) -> float | None:
        """Seconds from the sources to the pages of all users; None if those steps were not measured on this card."""
        if self.begin_s is None or self.embed_s is None or self.pages_s is None:
            return None
        return self.begin_s + self.embed_s + self.pages_s


@dataclass(frozen=True, slots=True)
class Card:
    """Measured rates of one kind of GPU."""

    card_name: str
    list_costs: tuple[ListCost, ListCost]
    """Costs at few and at many dimensions; other dimensions are interpolated linearly."""
    shard_cost: ShardCost | None = None

    def list_seconds(self, item_count: int, dims: int) -> float:
        """Return the seconds of one user's list: a part proportional to items plus a constant part, linear in dims."""
        low_dims_cost, high_dims_cost = self.list_costs
        dims_position = (dims - low_dims_cost.dims) / (high_dims_cost.dims - low_dims_cost.dims)
        item_dependent_s = (
            _interpolate(low_dims_cost.item_dependent_s, high_dims_cost.item_dependent_s, dims_position)
            * item_count
            / MEASURED_ITEMS
        )
        return item_dependent_s + _interpolate(low_dims_cost.constant_s, high_dims_cost.constant_s, dims_position)

    def forecast_night(self, user_count: int, item_count: int, dims: int, k: int) -> CardForecast:
        """Forecast the lists, and the steps up to the pages if those were measured on this card."""
        topk_s = user_count * self.list_seconds(item_count, dims)
        shard = self.shard_cost
        return CardForecast(
            self.card_name, user_count, item_count, dims, k, user_count / topk_s, topk_s,
            None if shard is None else user_count / shard.begin_users_per_s,
            None if shard is None else item_count * dims / shard.embed_numbers_per_s,
            None if shard is None else max(user_count / shard.users_per_s, topk_s),
            self._notes(item_count, dims, k),
        )  # fmt: skip

    def rate_in_words(self, k: int) -> str:
        """Describe the measurement that the rate comes from."""
        low_dims_cost = self.list_costs[0]
        text = (
            f"one {self.card_name} did {low_dims_cost.users_per_s:,} users/s with {MEASURED_ITEMS:,} items of "
            f"{low_dims_cost.dims}, "
            f"K = {MEASURED_K}"
        )
        return text if k == MEASURED_K else f"{text} (not {k})"

    def _notes(self, item_count: int, dims: int, k: int) -> tuple[str, ...]:
        low_dims_cost, high_dims_cost = self.list_costs
        notes = [self.rate_in_words(MEASURED_K)]
        if k != MEASURED_K:
            notes.append(f"lists of {k} were not measured: they count as lists of {MEASURED_K}")
        if not low_dims_cost.dims <= dims <= high_dims_cost.dims:
            notes.append(f"{dims} dimensions were not measured, {low_dims_cost.dims} to {high_dims_cost.dims} were")
        if item_count != MEASURED_ITEMS:
            notes.append(
                f"{item_count:,} items are extrapolated from {MEASURED_ITEMS:,}: {low_dims_cost.item_share:.0%} of a "
                "list's time "
                "grows with them"
            )
        if self.shard_cost is not None:
            notes.append(
                f"partition, item vectors and pages: with {self.shard_cost.core_count} cores and "
                f"{self.shard_cost.interactions_per_user} interactions a user; assembling, index, load and checks, and "
                "compiling kernels for the first time, are not counted"
            )
        return tuple(notes)


def _interpolate(value_at_zero: float, value_at_one: float, position: float) -> float:
    """Interpolate linearly between the values at 0 and at 1; the result is at least a tenth of `value_at_zero`."""
    return max(value_at_zero + position * (value_at_one - value_at_zero), value_at_zero / 10)


CARDS: Mapping[str, Card] = {
    "h200": Card(
        "NVIDIA H200",
        (ListCost(128, 1_088_674, 0.8175), ListCost(256, 639_953, 0.802)),
        ShardCost(256_682, 57_837, 14_595_211, core_count=16, interactions_per_user=16),
    )
}
"""Measured cards by the names of their result files."""


def find_card(card_name_or_prefix: str, cards: Mapping[str, Card] = CARDS) -> Card:
    """Return the card of this name, with or without its manufacturer, or of a unique prefix of a name.

    Raises ConfigError, listing the known cards, for any other name.
    """
    normalized_name = "-".join(card_name_or_prefix.lower().replace("-", " ").split()).removeprefix("nvidia-")
    if normalized_name in cards:
        return cards[normalized_name]
    matching_names = [
        card_name for card_name in cards if normalized_name and card_name.startswith(f"{normalized_name}-")
    ]
    if len(matching_names) == 1:
        return cards[matching_names[0]]
    raise ConfigError(
        f"there are no rates of a card {card_name_or_prefix!r}: measured were {', '.join(sorted(cards))} (a bench on "
        "another card is `make gpu`; without --card a GPU of this machine is tried)",
        card=card_name_or_prefix,
    )
