"""Names, types and labels of metrics as a service exposes them."""

from collections import defaultdict
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from tests.contract.side_by_side.decided import ADDED_METRICS, UNSUPPORTED_TYPE
from tests.contract.side_by_side.differences import Difference

CHANCE: Final = frozenset(
    {"le", "stage", "quantile", "generation", "version", "collector", "loop", "name", "replica", "host"}
)
"""Labels whose values depend on the machine, the moment or the run."""


UNSUPPORTED_TYPE_STATUS: Final = str(UNSUPPORTED_TYPE[0])


def exposed(text: str) -> dict[str, set[tuple[str, tuple[tuple[str, str], ...]]]]:
    """Samples of each family, under its name and type: their names, and labels with the values that do not vary."""
    families: defaultdict[str, set[tuple[str, tuple[tuple[str, str], ...]]]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        samples = families[f"{family.name} ({family.type})"]
        for sample in family.samples:
            if sample.labels.get("status") == UNSUPPORTED_TYPE_STATUS:
                continue  # on more routes than before, and a request of a seed may send such a body or not
            labels = ((name, "" if name in CHANCE else value) for name, value in sample.labels.items())
            samples.add((sample.name, tuple(sorted(labels))))
    return dict(families)


def difference_of_metrics(left: str, right: str) -> Difference | None:
    """The first family that two expositions do not have alike."""
    before, after = exposed(left), exposed(right)
    names = before.keys() | {name for name in after if name.split()[0] not in ADDED_METRICS}
    for name in sorted(names):
        left_samples, right_samples = before.get(name), after.get(name)
        if left_samples != right_samples:
            only = (
                sorted((left_samples or set()) - (right_samples or set())),
                sorted((right_samples or set()) - (left_samples or set())),
            )
            return Difference(name, *only)
    return None
