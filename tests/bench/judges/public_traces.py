"""Traces of real requests that others published: where each is from, its checksum, and how to read it.

None is kept here. LARDER_BENCH_DATA names a folder; its `traces/` holds the files under the names that they have in
their repositories. A file with other bytes is an error, a missing one is left out and said.
"""

import gzip
import hashlib
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tests.bench.tools.topk_cases import DATA
from tests.bench.tools.traces import Keys

Parse = Callable[[bytes], Keys]

CAFFEINE = (
    "ben-manes/caffeine@ccef9554",
    "simulator/src/main/resources/com/github/benmanes/caffeine/cache/simulator/parser",
)
CACHESIM = "1a1a11a/libCacheSim@aa0fc409", "data"
_OPENERS = {".xz": lzma.decompress, ".gz": gzip.decompress}


@dataclass(frozen=True, slots=True)
class Trace:
    """A published trace; `origin` is a repository of GitHub at a commit, and a folder in it."""

    name: str
    file: str
    sha256: str
    origin: tuple[str, str]
    parse: Parse

    def path(self) -> Path | None:
        """The file on this machine, if the environment names a folder that has it."""
        trace_path = Path(os.environ.get(DATA, ""), "traces", Path(self.file).name)
        return trace_path if DATA in os.environ and trace_path.exists() else None

    def where(self) -> str:
        """Place of the file among what others published."""
        repository, folder = self.origin
        return f"{repository}:{folder}/{self.file}"

    def keys(self) -> Keys:
        """Keys in the order of the requests, numbered by first appearance.

        Raises FileNotFoundError, and ValueError for other bytes than those that were judged before.
        """
        path = self.path()
        if path is None:
            raise FileNotFoundError(f"{self.name}: {DATA}/traces lacks {self.where()}")
        raw = path.read_bytes()
        if (digest := hashlib.sha256(raw).hexdigest()) != self.sha256:
            raise ValueError(f"{path} has sha256 {digest}, and {self.where()} {self.sha256}")
        return numbered(self.parse(_OPENERS.get(path.suffix, bytes)(raw)))


def numbered(names: Keys) -> Keys:
    """Number keys from 0 by first appearance."""
    _, first, name_indexes = np.unique(names, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[name_indexes]


def binary(raw: bytes, dtype: str) -> Keys:
    """One number per request."""
    return np.frombuffer(raw, dtype).astype(np.int64)


def text(raw: bytes, column: int = 0) -> Keys:
    """One line per request; a line `*` is a mark between phases."""
    lines = (line.split() for line in raw.splitlines())
    return np.array([int(line[column]) for line in lines if line and line[0] != b"*"], np.int64)


_int32, _int64 = partial(binary, dtype=">i4"), partial(binary, dtype=">i8")

TRACES = (
    Trace(
        "orm-busy",
        "cache2k/orm-busy.trace.xz",
        "0b1d6593387d713c98cc20a5b8c4128eaa983f94dcd70069b032dc1af9c2ceb3",
        CAFFEINE,
        _int32,
    ),
    Trace(
        "orm-night",
        "cache2k/orm-night.trace.xz",
        "144cc3050f79b202c70d4fb4b69023a485126adcd0ad2758fb4f5cc1ef0573b1",
        CAFFEINE,
        _int32,
    ),
    Trace(
        "web07",
        "cache2k/web07.trace.xz",
        "e50bb13aa66d1cc71877c8ea92c577be0d0ab5b2b4f7a16c87046af1097bd46a",
        CAFFEINE,
        _int32,
    ),
    Trace(
        "web12",
        "cache2k/web12.trace.xz",
        "a76c78e129a982fe17055d0a291ebf385e7a0aa7964bd091d006bcde862bcdad",
        CAFFEINE,
        _int32,
    ),
    Trace(
        "scarab-recs",
        "scarab/scarab-recs.trace.xz",
        "abf86a7eef62e1e5ed93afe318168bb72a575c6d552e9904426711039c05ede3",
        CAFFEINE,
        _int64,
    ),
    Trace(
        "vaultservice",
        "corda/trace_vaultservice.gz",
        "bc2c118fe0a56b877fc21d35ad2a46b19d2f28b593553b8aa36a788cc169b21c",
        CAFFEINE,
        _int64,
    ),
    Trace(
        "adapt-size",
        "adapt_size/request.trace.xz",
        "92df6bf9efbc981856c1a4612de9b671d203a090f1f7cb74e94d1f2eee1675b6",
        CAFFEINE,
        partial(text, column=1),
    ),
    Trace(
        "sprite",
        "lirs/sprite.trace.gz",
        "e2613162ee4d5134cf155ae090ccd1613a0a91f45e3a0bd636233b5bb42fc28d",
        CAFFEINE,
        text,
    ),
    Trace(
        "w106",
        "cloud_physics/w106.trace.xz",
        "679615d555d3f0c26771b0afd859caeee54e236908cd60105d08b547abadba21",
        CAFFEINE,
        partial(binary, dtype=">u4"),
    ),
    Trace(
        "cloud-physics",
        "cloudPhysicsIO.txt",
        "1b48334535801ae862d53e9d7623467186eeb93054462b38021fef273cab0439",
        CACHESIM,
        text,
    ),
)
"""Of web shops, a recommender's cache, web pages, a ledger, a content network, a file server, and two disks."""


def missing() -> list[str]:
    """Return a line for each trace that is not on this machine."""
    lacking = (trace for trace in TRACES if trace.path() is None)
    return [f"the trace {trace.name}: {DATA}/traces lacks {trace.where()}" for trace in lacking]
