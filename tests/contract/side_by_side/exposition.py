"""Names, types and labels of metrics as a service exposes them."""

from collections import defaultdict
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from tests.contract.side_by_side.decided import ADDED_METRICS, is_added_sample
from tests.contract.side_by_side.differences import Difference

CHANCE: Final = frozenset(
    {"le", "stage", "quantile", "generation", "version", "collector", "loop", "name", "replica", "host"}
)
"""Labels whose values depend on the machine, the moment or the run."""


def exposed(text: str) -> dict[str, set[tuple[str, tuple[tuple[str, str], ...]]]]:
    """Return the samples of each family by name and type: their names, and labels whose values do not vary."""
    families: defaultdict[str, set[tuple[str, tuple[tuple[str, str], ...]]]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        samples = families[f"{family.name} ({family.type})"]
        for sample in family.samples:
            labels = ((name, "" if name in CHANCE else value) for name, value in sample.labels.items())
            samples.add((sample.name, tuple(sorted(labels))))
    return dict(families)


def difference_of_metrics(left: str, right: str) -> Difference | None:
    """Return the first family in which two expositions differ."""
    before, after = exposed(left), exposed(right)
    names = before.keys() | {name for name in after if name.split()[0] not in ADDED_METRICS}
    for name in sorted(names):
        left_samples, right_samples = before.get(name), after.get(name)
        if left_samples != right_samples:
            only_left = (left_samples or set()) - (right_samples or set())
            only_right = (right_samples or set()) - (left_samples or set())
            only_right = {sample for sample in only_right if not is_added_sample(dict(sample[1]))}
            if None in (left_samples, right_samples) or only_left or only_right:
                return Difference(name, sorted(only_left), sorted(only_right))
    return None
