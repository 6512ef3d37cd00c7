"""Freeing of what an ended experiment leaves in Redis: the pages of arms' namespaces that nobody serves."""

from cache.errors import Conflict, UnknownGeneration
from cache.store.artefacts import read_manifest
from cache.store.audit import audited
from cache.store.experiments import latest_experiments
from precompute.bulk.governor import Governor, open_governor
from precompute.bulk.load import unlink_pages
from precompute.config.settings import NightConfig
from precompute.experiments.changes import settings_of
from precompute.releases.registry import open_releases
from precompute.releases.release import Releases
from precompute.releases.sweep import unlink_recorded


def free(config: NightConfig, name: str) -> dict[str, object]:
    """Remove from Redis what the namespaces of an ended experiment have there; how many keys, and what was kept.

    Left alone are the service's own namespace, those that another experiment names, and those in which a replica
    beats. To Redis it is as if it had lost them: files and release records stay, and `larder restore` in such a
    namespace brings them back. Raises Conflict for an experiment that is not over.
    """
    record = latest_experiments(config.store())
    experiment = record.find(name)
    if experiment is None or not experiment.is_over:
        raise Conflict(f"experiment {name} is not over: `experiment stop` ends it")
    needed = {config.namespace, *record.namespaces(config.namespace)}
    freed, kept_namespaces, keys = [], [], 0
    for arm in experiment.arms:
        if arm.namespace in needed:
            continue
        with open_releases(settings_of(config, arm.namespace)) as releases:
            if releases.control.replicas():
                kept_namespaces.append(arm.namespace)
                continue
            with audited(
                config.store(), "experiment", f"retire {name}", actor=config.actor
            ) as audit_details:
                audit_details["namespace"] = arm.namespace
                with open_governor(config.governor, releases.control) as governor:
                    keys += _free(releases, governor)
        freed.append(arm.namespace)
    return {"experiment": name, "freed": freed, "kept": kept_namespaces, "keys": keys}


def _free(releases: Releases, governor: Governor) -> int:
    """Pointer first, for nobody may start from here any more; rows last, for without them nobody finds the pages."""
    control, history = releases.control, releases.history()
    control.client.delete(control.keys.live, control.keys.next)
    removed = 0
    for generation in sorted(control.rows()):
        try:
            manifest = read_manifest(releases.store, generation)
        except UnknownGeneration:
            removed += unlink_recorded(releases, generation, history, governor=governor)
        else:
            removed += unlink_pages(control.client, control.keys, manifest, governor=governor)
        control.drop_row(generation)
    return removed
