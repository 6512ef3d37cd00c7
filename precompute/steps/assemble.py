"""Step `assemble`: checks that all shards were scored; their pages are numbered, nothing is sorted or moved."""

from typing import TypedDict

from cache.errors import Conflict
from precompute.builds.build import Build, record_step_time, with_host_copies
from precompute.builds.reports import ASSEMBLE_REPORT, BEGIN_REPORT, AssembleReport, BuildId, shard_report_name
from precompute.bulk.headroom import convert_disk_errors
from precompute.config.settings import NightConfig
from precompute.steps.night import Night, StepRow


class AssembleResult(TypedDict):
    """Result of the step."""

    generation: str
    users: int


@convert_disk_errors
@with_host_copies
def run(config: NightConfig, build: BuildId) -> AssembleResult:
    """Check that every shard was scored; raise Conflict naming those that were not."""
    generation_build = Build.of(config, build)
    generation_build.need_report(BEGIN_REPORT)
    with record_step_time(generation_build, "assemble"):
        shard_reports = [generation_build.read_report(shard_report_name(shard)) for shard in range(config.shards)]
        missing_shards = [shard for shard, report in enumerate(shard_reports) if report is None]
        if missing_shards:
            raise Conflict(f"shards {missing_shards} of {config.shards} were not scored")
        user_count = sum(report["users"]["scored"] for report in shard_reports if report is not None)
        generation_build.report(ASSEMBLE_REPORT, AssembleReport(users_scored=user_count))
    return {"generation": generation_build.generation, "users": user_count}


def in_night(night: Night) -> StepRow:
    """Run the step; return its row in a night's table."""
    result = run(night.config, night.build)
    return StepRow(result, f"{result['users']:,} users")
