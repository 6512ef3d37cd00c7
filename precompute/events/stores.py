"""Stores of all who read one stream of events: the namespace that it is of, and the arms of its experiments."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import orjson

from cache.errors import CorruptArtefact, UnknownGeneration
from cache.events.position import BEGINNING, Position
from cache.format.manifest import GENERATION
from cache.store.artefacts import ArtefactStore, generation_path, read_manifest
from cache.store.experiments import latest_experiments
from precompute.config.settings import NightConfig


@dataclass(frozen=True, slots=True)
class Stores:
    """Store of the namespace that the events are of, and those of its arms."""

    own: ArtefactStore
    namespace: str
    arms: tuple[ArtefactStore, ...] = ()

    @classmethod
    def of(cls, config: NightConfig) -> Self:
        """Stores by the newest record of the experiments."""
        config = config.of_events()
        own = config.store()
        named = latest_experiments(own).namespaces(config.namespace)
        arms = tuple(replace(config, namespace=each).store() for each in named)
        return cls(own, config.namespace, arms)

    def held(self) -> Iterator[Position]:
        """Positions that generations go up to; one that knows of no events of this stream asks for none."""
        for store in (self.own, *self.arms):
            for generation in filter(GENERATION.fullmatch, store.names("generations")):
                until: str | None
                try:
                    manifest = read_manifest(store, generation)
                    events = manifest.events
                    is_ours = events and (events.namespace or manifest.namespace) == self.namespace
                    until = events.until if events and is_ours else None
                except UnknownGeneration:  # in the making
                    raw = store.read(generation_path(generation, "work/begin.json"))
                    begun = None if raw is None else orjson.loads(raw).get("events")
                    until = (begun or {}).get("until")
                except CorruptArtefact:
                    yield BEGINNING
                    continue
                if until is not None:
                    yield Position.parse(until)

    def is_any_in_the_making(self) -> bool:
        """True while a generation has no manifest yet."""
        return any(
            "manifest.json" not in store.names(generation_path(each))
            for store in (self.own, *self.arms)
            for each in filter(GENERATION.fullmatch, store.names("generations"))
        )
