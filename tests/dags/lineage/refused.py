"""Sends a refused `verify` as a FAIL event through the provider's transport, as its listener does; for tests only.

A process of its own, since Airflow reads its settings as it is imported. Argument: JSON of what `begin` returned.
"""

import json
import sys
from typing import Any

from airflow.providers.openlineage.plugins.adapter import OpenLineageAdapter

from cache.errors import Refused
from tests.dags.lineage.extracted import RUN_ID, lineage_of


def main(build: dict[str, Any]) -> None:
    """Send the event."""
    OpenLineageAdapter().fail_task(
        run_id=RUN_ID, job_name="nightly_precompute.verify", end_time="2026-01-31T00:00:00Z",
        task=lineage_of("verify", build), nominal_start_time=None, nominal_end_time=None,
        owners=[], tags=[], job_description=None, error=Refused("coverage_of_live is too low"),
    )  # fmt: skip


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
