"""Prints the events of a night's steps as the extractor makes them; started by tests only.

A process of its own, since Airflow reads its settings as it is imported. Argument: JSON of what `begin` returned.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

from airflow.providers.openlineage.extractors import ExtractorManager
from airflow.providers.openlineage.extractors.base import OperatorLineage
from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
from openlineage.client.serde import Serde

from cache.config.timetable import NIGHT_STEPS, PRELIMINARY_STEPS

RUN_ID = "01a21a7d-03e6-767c-8abb-abc1316261be"
EVENTS = {"events": 3, "events_until": "1769731200000-0", "left_out": 0, "unreadable": 0}
"""What `take_events` returns; it knows of no generation."""


def lineage_of(task_id: str, build: dict[str, Any], dag_id: str = "nightly_precompute") -> OperatorLineage:
    """Return datasets and facets of a finished task."""
    kind = "_ShortCircuitDecoratedOperator" if task_id == "begin" else "_PythonDecoratedOperator"
    operator = SimpleNamespace(
        task_type=kind, dag_id=dag_id, task_id=task_id, op_args=(), inlets=[], outlets=[],
        op_kwargs={"build": build, "shard": 1} if task_id == "score_shard" else {"build": build},
        log=None,
    )  # fmt: skip
    extractor = ExtractorManager().extractors[kind](operator)
    returned = EVENTS if task_id == "take_events" else build
    instance = SimpleNamespace(xcom_pull=lambda task_ids: returned)
    lineage: OperatorLineage = extractor.extract_on_complete(instance)
    return lineage


def event(task_id: str, build: dict[str, Any], dag_id: str = "nightly_precompute") -> str:
    """Return the event of a finished task."""
    lineage = lineage_of(task_id, build, dag_id)
    event_json = Serde.to_json(
        RunEvent(
            eventTime="2026-01-31T00:00:00Z", eventType=RunState.COMPLETE,
            run=Run(RUN_ID, facets=lineage.run_facets), job=Job("test", task_id, facets=lineage.job_facets),
            inputs=lineage.inputs, outputs=lineage.outputs, producer="https://example.org",
        )
    )  # fmt: skip
    return str(event_json)


def main(build: dict[str, Any]) -> None:
    """Print one line for each task."""
    renamed = {"score": "score_shard", "index": "build_index"}
    for step in (*PRELIMINARY_STEPS, *NIGHT_STEPS):
        print(event(renamed.get(step, step), build))
    print(event("verify", build, dag_id="somebody_elses"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
