"""Training the reference bundle from the configured sources."""

import glob
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cache.artefacts import last_change
from cache.errors import ConfigError, SourceError
from precompute.build import Progress, quiet
from precompute.config import NightConfig, parse_time
from precompute.erasures.erasure import Erased, all_erasures
from precompute.models.reference import ReferenceData, train
from precompute.sources import feature_schema, read_features, read_interactions

SWAPS = 3


def train_reference(
    config: NightConfig, *, data_until: str | None = None, progress: Progress = quiet
) -> dict[str, Any]:
    """Train on all interactions (older than `data_until`, if given) and put the bundle where the night reads it."""
    started = time.perf_counter()
    if not config.sources.interactions:
        raise ConfigError("sources.interactions is empty: name the files to train on")
    users, items, rows = [], [], 0
    before = parse_time(data_until) if data_until else None
    erased = Erased.of(all_erasures(config.store()))
    read = read_interactions(config.sources, Path(config.base), before=before)
    for batch in map(erased.leave_out, read):
        users.append(batch.users.texts())
        items.append(batch.items.texts())
        rows += len(batch.times)
        progress("read interactions", rows, 0)
    if not rows:
        raise SourceError("the sources hold no interaction to train on")
    coded_users = pc.dictionary_encode(pa.chunked_array(users).combine_chunks())
    coded_items = pc.dictionary_encode(pa.chunked_array(items).combine_chunks())
    item_ids = coded_items.dictionary.to_pylist()
    data = ReferenceData(
        np.asarray(coded_users.indices, np.int64),
        np.asarray(coded_items.indices, np.int64),
        item_ids,
        _categories(config, item_ids),
    )
    target = config.path(config.bundle)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        chosen = config.reference
        bundle = train(data, beside, dims=chosen.dims, seed=chosen.seed, programs=chosen.programs)
        _put_in_place(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    progress("train", 1, 1)
    return {
        "bundle": str(target),
        "digest": bundle.digest,
        "users": len(coded_users.dictionary),
        "items": len(item_ids),
        "interactions": rows,
        "dims": bundle.dims,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _put_in_place(new: Path, target: Path) -> None:
    """Swap a whole folder in by renames; if that fails, the old one is back, and `heal` brings it back after a kill.

    A night that copies the bundle meanwhile sees the old one or the new one, or copies again.
    """
    for left in reversed(range(SWAPS)):
        old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
        had_one = target.exists()
        if had_one:
            target.replace(old)
        try:
            new.replace(target)
        except BaseException as error:
            if had_one and old.exists():
                old.replace(target)
            elif left and isinstance(error, OSError) and target.exists():
                continue  # a night that found no bundle has put the old one back: once more
            raise
        break
    for each in _left_over(target, "old"):
        shutil.rmtree(each, ignore_errors=True)


def heal(target: Path) -> bool:
    """Put the bundle back that a `train` killed between its two renames had moved aside; whether there was one."""
    if target.exists():
        return False
    for old in _left_over(target, "old"):
        try:
            old.rename(target)
        except OSError:
            continue
        return True
    return False


def sweep_training(target: Path, *, before: float) -> int:
    """Remove what killed trainings left beside a whole bundle before that time (Unix seconds); folders removed."""
    if not target.exists():
        return 0
    found = [
        each
        for kind in ("old", "part")
        for each in _left_over(target, kind)
        if last_change(each) < before
    ]
    for each in found:
        shutil.rmtree(each, ignore_errors=True)
    return len(found)


def _left_over(target: Path, kind: str) -> list[Path]:
    """Folders of killed swaps, the newest first."""
    found = [
        (last_change(each), each)
        for each in target.parent.glob(f".{glob.escape(target.name)}.????????.{kind}")
    ]
    return [each for _, each in sorted(found, reverse=True)]


def _categories(config: NightConfig, item_ids: list[str]) -> list[str] | None:
    """One category per item from the item features, where they have such a column."""
    sources = config.sources
    if not sources.item_features:
        return None
    path = config.path(sources.item_features)
    if sources.category_column not in feature_schema(path).names:
        return None
    known: dict[str, str] = {}
    for ids, columns in read_features(path, sources.item_column, (sources.category_column,)):
        known |= dict(
            zip(
                ids.texts().to_pylist(),
                columns[sources.category_column].cast(pa.string()).to_pylist(),
                strict=True,
            )
        )
    return [known.get(each) or "unknown" for each in item_ids]
