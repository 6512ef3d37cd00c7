"""Copies of a night, by step: the base and its inputs in `begin`, vectors of items, records of shards, and remarks."""

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cache.errors import CorruptArtefact, UnknownGeneration
from cache.format.item_table import ItemTable
from precompute.builds.build import Build
from precompute.bundles.bundle import Bundle
from precompute.config.settings import NightConfig
from precompute.releases.release_log import Releases
from precompute.reuse.base import BaseGeneration, choose_base
from precompute.reuse.inputs import earlier_partition
from precompute.reuse.item_records import item_records
from precompute.reuse.items import copied_vectors, digests_files, write_changes, write_item_digests
from precompute.reuse.reasons import base_in_words, users_in_words
from precompute.reuse.reproducibility import regrouped_alike
from precompute.reuse.reuse_fact import users_by_reason
from precompute.reuse.shard_reuse import ShardReuse
from precompute.scoring.copies import (
    CopiedVectors,
    EmbeddingCopies,
    ItemCopies,
    NightCopies,
    ShardScope,
    UserCopies,
)


def choose_copies(
    releases: Releases, config: NightConfig, bundle: Bundle, *, making: str
) -> NightCopies:
    """Choose the base, and return what a night takes over from it in `begin`; nothing without a base."""
    base, reason = choose_base(releases, config, bundle, making=making)
    if base is None:
        facts = {"generation": None, "has_lists": False, "why": reason}
        return NightCopies(
            facts,
            write_item_digests,
            digests_files,
            earlier_partition=lambda *_, **__: (None, reason),
        )
    facts = {"generation": base.generation, "has_lists": base.has_lists, "why": reason}
    return NightCopies(
        facts, write_item_digests, digests_files, partial(copied_vectors, base),
        partial(earlier_partition, base),
    )  # fmt: skip


def copies_of_embedding(
    build: Build, bundle: Bundle, items: ItemTable, device: str | None
) -> EmbeddingCopies:
    """Return the vectors that can be copied from the base; only of a model whose rows do not depend on other rows."""
    base = BaseGeneration.open(build.config, build.need("begin"))
    if base is None:
        return EmbeddingCopies(finish=partial(_finish_embedding, build, None, {}, None))
    regrouped = regrouped_alike(build, base, bundle, items, device)
    vectors = None
    if regrouped.get(bundle.item_tower.name):
        for name in digests_files(bundle):
            build.fetch(name)
        vectors = copied_vectors(base, bundle, items, build.root, device)
    return EmbeddingCopies(vectors, partial(_finish_embedding, build, base, regrouped, vectors))


def _finish_embedding(
    build: Build,
    base: BaseGeneration | None,
    regrouped: Mapping[str, bool],
    vectors: CopiedVectors | None,
    items: ItemTable,
) -> dict[str, Any]:
    return {
        "regrouped": regrouped,
        "changes": _write_changes(build, base, items),
        "base": None if base is None else base.manifest.generation,
        "copied": 0 if vectors is None else int((vectors.base_ordinals >= 0).sum()),
    }


def _write_changes(build: Build, base: BaseGeneration | None, items: ItemTable) -> bool:
    """Writes how the items differ from the base's; False where there is none to compare with, or it is damaged."""
    if base is None or base.manifest.items.dims != items.vectors.shape[1]:
        return False
    try:
        build.finish(*write_changes(base, build, items))
    except (CorruptArtefact, UnknownGeneration):
        return False
    return True


class BaseSource:
    """Base that `begin` chose for one build, from which its shards copy; opened at the first use."""

    def __init__(self) -> None:
        self._bases: list[BaseGeneration | None] = []
        self._opening = threading.Lock()

    def _base(self, build: Build) -> BaseGeneration | None:
        with self._opening:
            if not self._bases:
                self._bases.append(BaseGeneration.open(build.config, build.need("begin")))
            return self._bases[0]

    def user_copies(self, shard: ShardScope) -> UserCopies | None:
        """Return the records of users; None if none of the shard can be copied."""
        base = self._base(shard.build)
        return None if base is None else ShardReuse.open(base, shard)

    def item_copies(self, shard: ShardScope) -> ItemCopies | None:
        """Return the records of items; None if none of the shard can be copied."""
        base = self._base(shard.build)
        return None if base is None else item_records(base, shard)


def base_remark(begin_report: Mapping[str, Any], _config: NightConfig) -> str:
    """Return a line on the base, after a line break."""
    return f"\n{base_in_words(begin_report.get('base') or {})}"


def users_remark(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a line on users by reason, after a line break, from the reports of shards; empty without copies."""
    reasons = users_by_reason(reports)
    if sum(reasons.values()) <= reasons["computed"]:
        return ""
    return f"\nusers: {users_in_words(reasons)}"
