"""State of a namespace in files, in Redis and in its history, to compare two namespaces."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cache.control.control_keys import Control
from cache.control.states import GenerationState
from cache.l2.sync_clients import connect
from cache.store.artefacts import read_manifest, sha256_of
from cache.store.releases import MOVE_ACTIONS, all_releases
from precompute.bulk.load import parts_of
from precompute.bulk.readback import verify_part
from precompute.config.settings import NightConfig
from precompute.releases.release_log import Releases
from tests.opened import open_generation

COMPARED = ("directory/", "items/", "tables/", "defaults.json")
"""Bytes of a generation that a repeated night must reproduce: directory, items, pages and defaults."""


@dataclass(frozen=True, slots=True)
class NamespaceState:
    """Everything that must come out the same after a crash; `files` and `pages` are name -> content."""

    live: str | None
    previous: str | None
    canary: tuple[str, float] | None
    states: Mapping[str, GenerationState | None]
    registry: Mapping[str, GenerationState]
    files: Mapping[str, str]
    pages: Mapping[str, bytes | dict[bytes, bytes]]

    def differences(self, other_namespace: "NamespaceState") -> list[str]:
        """Return one line for each difference."""
        difference_lines = [
            f"{name}: {getattr(self, name)} here, {getattr(other_namespace, name)} there"
            for name in ("live", "previous", "canary", "states", "registry")
            if getattr(self, name) != getattr(other_namespace, name)
        ]
        for field_name in ("files", "pages"):
            own_content, other_content = (getattr(self, field_name), getattr(other_namespace, field_name))
            names = sorted(own_content.keys() | other_content.keys())
            difference_lines += [
                f"{name} {'differs' if name in own_content and name in other_content else 'is only on one side'}"
                for name in names
                if own_content.get(name) != other_content.get(name)
            ]
        return difference_lines


def read_namespace_state(config: NightConfig) -> NamespaceState:
    """Read the namespace's state, without unfinished (hidden) files and durations of late steps."""
    store, keys = config.store(), config.keyspace()
    files = {}
    for generation in store.names("generations"):
        root = store.local(f"generations/{generation}")
        for path in root.rglob("*"):
            name = path.relative_to(root).as_posix()
            if path.is_file() and not path.name.startswith(".") and path.parent.name != "times":
                is_compared = name.startswith(COMPARED)
                files[f"{generation}/{name}"] = sha256_of(path) if is_compared else "there"
    with connect(config.redis_url, 5.0) as client:
        releases = Releases(store, Control(client, keys))
        view = releases.view()
        names: list[Any] = sorted(client.scan_iter(f"larder:1:{config.namespace}:g:*", 1_000))
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(name) if name.endswith(b":loaded") else pipeline.get(name)
        pages = dict(zip((key.decode() for key in names), pipeline.execute(), strict=True))
        canary = view.pointer.canary if view.pointer else None
        return NamespaceState(
            live=view.pointer.generation if view.pointer else None,
            previous=view.pointer.previous if view.pointer else None,
            canary=(canary.generation, canary.percent) if canary else None,
            states={
                generation: releases.state(generation, view.ledger)
                for generation in view.ledger.state_by_generation or {}
            },
            registry={generation: row.state for generation, row in view.registry_rows.items()},
            files=files,
            pages=pages,
        )


def assert_whole(config: NightConfig) -> str:
    """Check that the live generation has all files and pages, and keys only known generations; return it."""
    store, keys = config.store(), config.keyspace()
    with connect(config.redis_url, 5.0) as client:
        releases = Releases(store, Control(client, keys))
        view = releases.view()
        assert view.pointer is not None
        live, previous = view.pointer.generation, view.pointer.previous
        assert (view.ledger.live_generation, view.ledger.live_epoch) == (live, view.pointer.epoch)
        assert releases.state(live, view.ledger) is GenerationState.LIVE
        assert previous is None or releases.state(previous, view.ledger) is GenerationState.SUPERSEDED
        assert all(gate["passed"] for gate in read_manifest(store, live).gates)
        for generation in filter(None, (live, previous)):
            manifest, root = open_generation(store, generation)
            for part in parts_of(manifest):
                assert verify_part(client, keys, manifest, root, part) == part.pages.pages
        for kind in ("g", "w"):
            for name in client.scan_iter(f"larder:1:{config.namespace}:{kind}:*", 1_000):
                assert name.decode().split(":")[4] in view.registry_rows, f"{name} is of no known generation"
        return live


def moves(config: NightConfig) -> list[str]:
    """Return the generations that were live, in order."""
    return [
        release.generation
        for release in all_releases(config.store())
        if release.is_done and release.action in MOVE_ACTIONS
    ]
