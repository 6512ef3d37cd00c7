"""Room that the arms of experiments take beside the service's own namespace: in Redis, and on each of its hosts."""

from collections.abc import Iterable
from dataclasses import dataclass

import redis

from cache.errors import LarderError
from cache.format.manifest import Manifest
from cache.format.redis_keys import Keyspace
from cache.store.artefacts import read_manifest
from cache.store.experiments import latest_experiments
from precompute.bulk.parts import total_bytes, total_pages
from precompute.config.settings import NightConfig
from precompute.control.control_keys import Control
from precompute.control.states import State
from precompute.experiments.changes import settings_of


@dataclass(frozen=True, slots=True)
class ArmRoom:
    """Room of a namespace that arms name: `pages` and `size_bytes` of all its generations in Redis.

    `largest_bytes` of pages and `mapped_bytes` of files on a reader's host are those of its largest generation.
    """

    namespace: str
    arms: tuple[str, ...]
    generations: int
    pages: int
    size_bytes: int
    largest_bytes: int
    mapped_bytes: int

    def growth_bytes(self, generations: int) -> int:
        """Bytes that come to its pages where so many generations of its largest one coexist."""
        return max(0, generations * self.largest_bytes - self.size_bytes)

    def __str__(self) -> str:
        return f"{', '.join(self.arms)} ({self.namespace}): {self.pages:,} pages, {self.size_bytes:,} bytes"


def arms_room(config: NightConfig, client: "redis.Redis") -> tuple[ArmRoom, ...]:
    """Room of each namespace, beside the own one, that an experiment names which is not over."""
    record = latest_experiments(config.store())
    rooms = []
    for namespace in record.namespaces(config.namespace):
        arms = tuple(
            f"{experiment.name}={arm.name}"
            for experiment in record.current
            for arm in experiment.arms
            if arm.namespace == namespace
        )
        manifests = _manifests(settings_of(config, namespace), Control(client, Keyspace(namespace)))
        sizes = [total_bytes(manifest) for manifest in manifests]
        pages = sum(map(total_pages, manifests))
        mapped = [sum(file.size_bytes for file in manifest.artefacts()) for manifest in manifests]
        rooms.append(ArmRoom(
            namespace, arms, len(manifests), pages, sum(sizes), max(sizes, default=0),
            max(mapped, default=0),
        ))  # fmt: skip
    return tuple(rooms)


def sum_mapped_bytes(arms: Iterable[ArmRoom], generations: int) -> int:
    """Bytes that readers map of the arms, where so many generations of each coexist on a host."""
    return sum(generations * arm.mapped_bytes for arm in arms)


def _manifests(config: NightConfig, control: Control) -> list[Manifest]:
    manifests = []
    for generation, row in control.rows().items():
        if row.state is not State.RETIRED:
            try:
                manifests.append(read_manifest(config.store(), generation))
            except LarderError:  # one in the making has no pages yet
                continue
    return manifests
