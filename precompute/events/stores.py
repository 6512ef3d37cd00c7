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
class EventStores:
    """Store of the namespace that the events are of, and those of its arms."""

    home_store: ArtefactStore
    namespace: str
    arms: tuple[ArtefactStore, ...] = ()

    @classmethod
    def of(cls, config: NightConfig) -> Self:
        """Stores by the newest record of the experiments."""
        config = config.of_events()
        own_store = config.store()
        named = latest_experiments(own_store).namespaces(config.namespace)
        arms = tuple(replace(config, namespace=arm_namespace).store() for arm_namespace in named)
        return cls(own_store, config.namespace, arms)

    def iter_generation_positions(self) -> Iterator[Position]:
        """Positions that generations go up to; one that knows of no events of this stream asks for none."""
        for store in (self.home_store, *self.arms):
            for generation in filter(GENERATION.fullmatch, store.names("generations")):
                end_text: str | None
                try:
                    manifest = read_manifest(store, generation)
                    events = manifest.events
                    is_own_namespace = (
                        events and (events.namespace or manifest.namespace) == self.namespace
                    )
                    end_text = events.until if events and is_own_namespace else None
                except UnknownGeneration:  # in the making
                    raw = store.read(generation_path(generation, "work/begin.json"))
                    begin_events = None if raw is None else orjson.loads(raw).get("events")
                    end_text = (begin_events or {}).get("until")
                except CorruptArtefact:
                    yield BEGINNING
                    continue
                if end_text is not None:
                    yield Position.parse(end_text)

    def is_any_in_the_making(self) -> bool:
        """True while a generation has no manifest yet."""
        return any(
            "manifest.json" not in store.names(generation_path(generation))
            for store in (self.home_store, *self.arms)
            for generation in filter(GENERATION.fullmatch, store.names("generations"))
        )
