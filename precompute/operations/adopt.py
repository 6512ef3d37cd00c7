"""Adopting a Redis whose pointer no release record explains: the artefact store decides what is live."""

import logging
from typing import Any

from cache.errors import Conflict, CorruptArtefact
from cache.format.manifest import GENERATION
from cache.resp.reply_shapes import COUNT, checked
from cache.store.releases import Pointer
from precompute.config.progress import Progress, Step, quiet
from precompute.config.settings import NightConfig
from precompute.config.validation import demand_reason
from precompute.control.rows import RegistryRow
from precompute.control.states import UNFINISHED, Ledger, State, fold
from precompute.operations.restore import restore
from precompute.releases.registry import open_releases
from precompute.releases.release_log import ReleaseLog

log = logging.getLogger(__name__)

# Only what was looked at is removed: a pointer that moved meanwhile is somebody's.
_REMOVE = """#!lua flags=allow-oom
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


def adopt(config: NightConfig, *, reason: str, attempt: str, progress: Progress = quiet) -> Step:
    """Take a stray pointer away and restore what the store says is live; nothing, if nothing was ever published.

    The reason is written down, under an epoch above the stray one, so that readers who saw that follow what comes
    next. Raises ConfigError without a reason, Conflict where the releases explain the pointer or there is none.
    """
    reason = demand_reason("adopting a Redis", reason)
    with open_releases(config) as releases:
        keys, client = releases.control.keys, releases.control.client
        raw: Any = client.get(keys.live)
        if raw is None:
            raise Conflict(
                f"{keys.live} holds no pointer, so there is nothing to adopt: run `larder restore`"
            )
        stray = _pointer(raw)
        ledger = releases.ledger() if stray is not None else fold(releases.history())
        if stray is not None and stray.epoch <= ledger.live_epoch:
            raise Conflict(
                f"the releases in {releases.store.url} explain the pointer in {keys.live}: run "
                "`larder restore` without --adopt"
            )
        if ledger.live is not None:
            releases.check_manifest(ledger.live, releases.history())
        if stray is not None:
            about = stray.generation if GENERATION.fullmatch(stray.generation) else "unknown"
            # An intent that is never completed: it changes nothing but the epoch, and keeps the reason.
            releases.record(
                "restore", about, attempt=attempt, reason=f"adopted: {reason}",
                expected=stray.epoch,
            )  # fmt: skip
        if not checked("EVAL", client.eval(_REMOVE, 1, keys.live, raw), COUNT):
            raise Conflict(
                f"the pointer in {keys.live} moved while it was looked at; look at `status`"
            )
        log.warning("removed from %s, since %s: %.200r", keys.live, reason, raw)
        _disown(releases, ledger, reason)
    removed = raw.decode(errors="replace")[:200]
    if ledger.live is None:
        return {"removed": removed, "generation": None, "next": "the first night can publish"}
    return {"removed": removed, **restore(config, attempt=attempt, progress=progress)}


def _pointer(raw: bytes) -> Pointer | None:
    try:
        return Pointer.from_bytes(raw)
    except CorruptArtefact:
        return None


def _disown(releases: ReleaseLog, ledger: Ledger, reason: str) -> None:
    """Abandons what only Redis calls published: it may be made and verified again, or swept."""
    abandoned_at = releases.clock()
    rows = {
        generation: RegistryRow(State.ABANDONED, abandoned_at, f"adopted: {reason}")
        for generation, row in releases.control.rows().items()
        if ledger.state(generation) is None and row.state not in (*UNFINISHED, State.RETIRED)
    }
    if rows:
        releases.control.write_rows(rows, expected_epoch=0)
