"""A world of tiny generations: files on disk, pages in a real Redis, a clock that only tests move."""

import hashlib
import itertools
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from cache.control.control_keys import Control, RegistryRow
from cache.control.states import GenerationState
from cache.format.manifest import Artefact, DirectoryPart, EntitySet, ItemFiles, Manifest, Producer, Table, TablePart
from cache.format.redis_keys import Keyspace
from cache.records import Layout, encode_numbers
from cache.store.artefacts import ArtefactStore, describe_file, generation_path, write_atomically
from cache.store.releases import Pointer
from precompute.bulk.reload import reload
from precompute.releases import moves
from precompute.releases.release_log import Releases

if TYPE_CHECKING:
    import redis

A, B, C, D = (f"2026010{day}T000000Z-{'0' * 11}{day}" for day in (1, 2, 3, 4))
LAYOUT = Layout("value", 4, "f4")


class Clock:
    """Unix seconds that only tests move."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


class TimedControl(Control):
    """A control plane whose Redis clock is the test's."""

    def __init__(self, client: "redis.Redis", keys: Keyspace, clock: Clock) -> None:
        super().__init__(client, keys)
        self.time = clock  # type: ignore[method-assign]


class World:
    """A store with tiny generations and the releases over them."""

    def __init__(self, store: ArtefactStore, client: "redis.Redis", keys: Keyspace) -> None:
        self.store, self.client, self.keys, self.clock = store, client, keys, Clock()
        self.control = TimedControl(client, keys, self.clock)
        self.releases = Releases(store, self.control)
        self.numbers = itertools.count()

    def attempt(self) -> str:
        """Return a name that no other attempt has."""
        return f"attempt-{next(self.numbers)}"

    def make(self, generation: str, records: int = 50) -> Manifest:
        """Write a generation with one value table in two parts, in pages of 10 records."""
        root = self.store.local(generation_path(generation))
        seed = int(hashlib.sha256(generation.encode()).hexdigest()[:8], 16)
        rng = np.random.default_rng(seed)
        parts, page = [], 0
        for number in range(2):
            name = f"tables/score/{number:04d}"
            fingerprints = rng.integers(0, 2**63, records, dtype=np.uint64)
            data = encode_numbers(LAYOUT, fingerprints, rng.random((records, 4), np.float32), 0).tobytes()
            write_atomically(root / f"{name}.pages", data)
            size = 10 * LAYOUT.size_bytes
            sums = [xxhash.xxh3_64_intdigest(data[at : at + size]) for at in range(0, len(data), size)]
            write_atomically(root / f"{name}.sums", np.array(sums, "<u8").tobytes())
            files = (describe_file(root, f"{name}.pages"), describe_file(root, f"{name}.sums"))
            parts.append(TablePart(page, len(sums), records, *files))
            page += len(sums)
        empty_artefact = Artefact("none", 0, "")
        manifest = Manifest(
            namespace=self.keys.namespace,
            generation=generation,
            data_until=0,
            created_at=0,
            bundle_digest="",
            inputs_digest="",
            entity_sets={"user": EntitySet("user", 0, 0, (DirectoryPart(0, 0, empty_artefact),))},
            items=ItemFiles(empty_artefact, empty_artefact, empty_artefact, empty_artefact, 0, 0),
            tables={"score": Table("score", "user", Producer("none"), LAYOUT, 10, tuple(parts), ())},
            models={},
            indexes={},
            defaults=empty_artefact,
            gates=({"rule": "any", "passed": True},),
        )
        self.store.write(generation_path(generation, "manifest.json"), manifest.to_bytes())
        return manifest

    def load(self, generation: str) -> Manifest:
        """Write rows first, then pages, as the pipeline does."""
        manifest = self.make(generation)
        self.control.set_row(generation, RegistryRow(GenerationState.BEGUN, self.clock()))
        reload(self.control, self.store, generation, chunk_bytes=1000)
        self.control.set_row(generation, RegistryRow(GenerationState.VERIFIED, self.clock()))
        return manifest

    def publish(self, *generations: str) -> None:
        """Load and publish each generation, a day apart."""
        for generation in generations:
            self.load(generation)
            self.clock.now_s += 86_400
            moves.publish(self.releases, generation, attempt=self.attempt())

    def live(self) -> Pointer:
        """The generation that readers follow."""
        pointer = self.control.read_pointer()
        assert pointer is not None
        return pointer

    def pages(self) -> set[str]:
        """All page keys in Redis (a test may scan)."""
        pattern = f"larder:1:{self.keys.namespace}:g:*"
        return {key.decode() for key in self.client.scan_iter(pattern) if not key.endswith(b":loaded")}


def meanwhile(monkeypatch, owner, name, action):
    """Run `action` once, just after (or, for Control.move_pointer, just before) the next call of `owner.name`."""
    real, first = getattr(owner, name), [True]

    def call(*arguments, **options):
        is_action_first = name == "move_pointer"
        if is_action_first and first and first.pop():
            action()
        answer = real(*arguments, **options)
        if not is_action_first and first and first.pop():
            action()
        return answer

    monkeypatch.setattr(owner, name, call)


def lose_redis(world):
    for key in world.client.scan_iter(f"larder:1:*{world.keys.namespace}*"):
        world.client.delete(key)


def pages_of(world, generation):
    return {key for key in world.pages() if key.split(":")[4] == generation}


def keep_intents(write_once, die):
    return lambda path, data: die() if path.endswith(".done") else write_once(path, data)
