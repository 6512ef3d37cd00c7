"""Step `publish`: moves the pointer to a verified generation, once replicas hold it ready."""

from typing import Any, NotRequired, TypedDict

from cache.control.control_keys import Control
from cache.errors import CorruptArtefact
from cache.format.directory import Directory
from cache.format.manifest import Manifest, Table
from cache.store.artefacts import fetch_checked
from cache.store.audit import audited
from precompute.builds.build import Build, record_step_time, with_host_copies
from precompute.builds.reports import VERIFY_REPORT, BuildId
from precompute.builds.seal import write_manifest
from precompute.bulk.governor import open_governor
from precompute.config.progress import Progress, quiet
from precompute.config.settings import NightConfig
from precompute.features import fact_functions, remarks_on_publish
from precompute.releases import moves
from precompute.releases.release_log import open_releases
from precompute.releases.replication import VerifyReport, confirm_pages, run_ids
from precompute.releases.staging import StagingNote, staged
from precompute.steps.night import Night, StepRow


class PublishResult(TypedDict):
    """Result of the step: the pointer, and whether it was moved; `notes` on a publish."""

    generation: str
    epoch: int
    previous: str | None
    changed: bool
    notes: NotRequired[list[str]]


@with_host_copies
def run(config: NightConfig, verified: BuildId, *, attempt: str, progress: Progress = quiet) -> PublishResult:
    """Check a record of every table, wait until replicas hold the generation ready, move the pointer and read it back.

    Raises Conflict, without publishing, if too few replicas become ready within `flip.wait_s`, if replicas of Redis lag
    for that long, or if another generation is live than the one that `verify` compared with.
    """
    build = Build.of(config, verified)
    manifest = write_manifest(build, fact_functions())
    with (
        audited(build.store, "publish", build.generation, actor=config.actor, attempt=attempt) as audit_details,
        record_step_time(build, "publish"),
        open_releases(config) as releases,
        open_governor(config.governor, releases.control) as governor,
    ):
        verify_report = build.read_report(VERIFY_REPORT) or {}
        move_result = moves.prepare_publish(
            releases, build.generation, attempt=attempt, verified=verify_report, governor=governor
        )
        if move_result is None:
            for entity_set in manifest.entity_sets.values():
                for part in entity_set.parts:
                    fetch_checked(build.store, build.generation, part.file)
            # Checked before the pointer moves, since readers would fail after it.
            for table in manifest.stored_tables.values():
                _check_last_record(build, manifest, table, releases.control)
            # Done before replicas are asked to wait: if a Redis node was restarted, all pages are read back, which
            # takes long.
            wait_s = config.flip.wait_s
            confirm_pages(releases, build.generation, verify_report, timeout_s=wait_s, governor=governor)
            node_report: VerifyReport = {"run_ids": run_ids(releases.control.client)}
            with staged(releases.control, build.generation, config.flip, attempt=attempt, progress=progress):
                confirm_pages(releases, build.generation, node_report, timeout_s=wait_s, governor=governor)
                move_result = moves.publish(
                    releases, build.generation, attempt=attempt, verified=verify_report, governor=governor
                )
        else:
            # A publisher that was killed right after its move left its note, for which replicas would hold the
            # generation.
            StagingNote(releases.control).clear(attempt, build.generation)
        live_pointer = releases.control.read_pointer()
        if live_pointer is None or live_pointer.epoch < move_result.pointer.epoch:
            raise CorruptArtefact("the written pointer cannot be read back")
        audit_details["changed"] = move_result.has_moved
    return {
        "generation": move_result.pointer.generation,
        "epoch": move_result.pointer.epoch,
        "previous": move_result.pointer.previous,
        "changed": move_result.has_moved,
    }


def _check_last_record(build: Build, manifest: Manifest, table: Table, control: Control) -> None:
    directory = Directory.open(build.root, manifest.entity_sets[table.entity])
    if not directory.count:
        return
    page, offset = table.locate_record(*directory.locate_in_part(directory.count - 1))
    page_key = control.keyspace.page(manifest.generation, table.name, page)
    raw_record: Any = control.client.getrange(page_key, offset, offset + table.layout.size_bytes - 1)
    if len(raw_record) != table.layout.size_bytes:
        raise CorruptArtefact(f"the last record of {table.name} cannot be read back from Redis", page=page_key)


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    remarks = [remark(night.config, night.build["generation"]) for remark in remarks_on_publish()]
    result = run(night.config, night.build, attempt=night.attempt, progress=night.progress)
    publish_remarks = [remark for remark in remarks if remark and result["changed"]]
    if publish_remarks:
        result = {**result, "notes": publish_remarks}
    summary = f"epoch {result['epoch']}, previous {result['previous'] or 'none'}"
    return StepRow(result, "\n".join([summary, *publish_remarks]))
