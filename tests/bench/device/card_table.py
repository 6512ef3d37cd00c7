"""Prints the table of measured GPUs that `plan --card` goes by, from the results that benches of them left.

`python -m tests.bench.device.card_table` prints `CARDS` of `precompute.planning.cards`; a test holds both together.
"""

import json
from pathlib import Path
from typing import Any

from precompute.planning.cards import MEASURED_ITEMS, Card, ListCost, ShardCost
from tests.bench.device.drawn import CLICKS

RESULTS = Path(__file__).parents[1] / "results"
CASES = {128: "million", 256: "million256"}
"""Cases of the bench `gpu` by the dimensions of their vectors."""
STAGES = ("copies", "histories", "bounds", "exact", "best")
GROWING_STAGE = "bounds"
"""The stage of a search that looks at all items."""
FEW_ITEMS = 0.1
"""Part of the items that the bench `gpu` measures the lists of besides."""


def measured_cards(folder: Path = RESULTS) -> dict[str, Card]:
    """Cards by the name of their results' files."""
    return {
        path.stem.removeprefix("gpu-"): card_of(path.stem.removeprefix("gpu-"), folder)
        for path in sorted(folder.glob("gpu-*.json"))
    }


def card_of(name: str, folder: Path = RESULTS) -> Card:
    """The rates of one card, by its results."""
    figures = _figures(folder / f"gpu-{name}.json")
    low_dims_cost, high_dims_cost = (list_cost(figures, case, dims) for dims, case in CASES.items())
    shard = folder / f"shard-{name}.json"
    return Card(figures["device_name"], (low_dims_cost, high_dims_cost), shard_cost(shard) if shard.exists() else None)


def list_cost(figures: dict[str, Any], case: str, dims: int) -> ListCost:
    """Cost of a list in one case: its rate, and the share of it that grows with the items.

    The share is that of the stage that looks at all items; or, if a tenth of the items was measured as well, that of
    the line through both.
    """
    if figures[f"{case}_items"] != MEASURED_ITEMS:
        raise ValueError(f"{case} has {figures[f'{case}_items']:,} items: not a whole run")
    rate = figures[f"{case}_users_per_s"]
    if (tenth_items_rate := figures.get(f"{case}_tenth_users_per_s")) is not None:
        item_share = (1 - rate / tenth_items_rate) / (1 - FEW_ITEMS)
    else:
        stages = {stage: figures[f"{case}_{stage}_us"] for stage in STAGES}
        item_share = stages[GROWING_STAGE] / sum(stages.values())
    return ListCost(dims, rate, round(min(max(item_share, 0.0), 1.0), 4))


def shard_cost(path: Path) -> ShardCost:
    """Cost of a night up to its pages, by the bench `device.shard`."""
    bench_result = json.loads(path.read_text())
    figures = bench_result["figures"]
    rate = bench_result["rows"]["shard.from_partition_to_pages_vs_kernel"]["candidate"]
    return ShardCost(
        round(rate),
        round(figures["users"] / figures["begin_s"]),
        round(figures["items"] * figures["dims"] / figures["embed_s"]),
        bench_result["machine"]["cores"],
        CLICKS,
    )


def _figures(path: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(path.read_text())["figures"]
    return figures


def main() -> None:
    """Print the table as it stands in the source."""
    print("CARDS: Mapping[str, Card] = {")
    for name, card in measured_cards().items():
        costs = ", ".join(f"ListCost({cost.dims}, {cost.users_per_s:_}, {cost.item_share})" for cost in card.list_costs)
        print(f'    "{name}": Card(\n        "{card.card_name}",\n        ({costs}),')
        if (shard := card.shard_cost) is not None:
            print(
                f"        ShardCost({shard.users_per_s:_}, {shard.begin_users_per_s:_}, "
                f"{shard.embed_numbers_per_s:_}, core_count={shard.core_count}, "
                f"interactions_per_user={shard.interactions_per_user}),"
            )
        print("    ),")
    print("}")


if __name__ == "__main__":
    main()
