"""Extractor for Airflow's OpenLineage provider; AIRFLOW__OPENLINEAGE__EXTRACTORS enables it without changes to DAGs."""

from collections.abc import Mapping
from typing import Any, Final

from airflow.providers.openlineage.extractors.base import BaseExtractor, OperatorLineage
from airflow.providers.openlineage.utils.utils import get_unknown_source_attribute_run_facet
from openlineage.client.event_v2 import InputDataset, OutputDataset
from openlineage.client.facet_v2 import (
    DatasetFacet,
    data_quality_assertions_dataset,
    dataset_version_dataset,
    input_statistics_input_dataset,
    output_statistics_output_dataset,
    symlinks_dataset,
)

from cache.config.timetable import NIGHT_STEPS, PRELIMINARY_STEPS
from infra.lineage.step_datasets import Check, FinishedStep, StepDataset, list_step_datasets
from precompute.builds.build import Build
from precompute.config.settings import night_config

NIGHTLY_DAG_ID: Final = "nightly_precompute"
_STEP_BY_TASK_ID: Final = {"score_shard": "score", "build_index": "index"}
_STEPS_IDENTIFIED_BY_RESULT: Final = (*PRELIMINARY_STEPS, "begin")
"""Steps whose generation or events are known only from their results, not from their arguments."""


class NightExtractor(BaseExtractor):
    """Extractor of the datasets of a night's tasks after they end; tasks of other DAGs get the provider's default."""

    @classmethod
    def get_operator_classnames(cls) -> list[str]:
        """Return the operator classes of `@task` and `@task.short_circuit`."""
        return ["_PythonDecoratedOperator", "_ShortCircuitDecoratedOperator"]

    def _execute_extraction(self) -> OperatorLineage:
        if self._step is not None:  # the datasets are known only when the step ends
            return OperatorLineage()
        # The provider does the same for a class without extractor.
        return OperatorLineage(run_facets=get_unknown_source_attribute_run_facet(self.operator))

    def extract_on_complete(self, task_instance: Any) -> OperatorLineage:
        """Return the datasets that a finished or failed step read and wrote, with counts and verdicts."""
        step = self._step
        if step is None:
            return self._execute_extraction()
        operator_arguments = [*self.operator.op_args, *self.operator.op_kwargs.values()]
        build_fields: Mapping[str, Any] = next(
            (argument for argument in operator_arguments if is_build_argument(argument)), {}
        )
        if step in _STEPS_IDENTIFIED_BY_RESULT:
            build_fields = task_instance.xcom_pull(task_ids=self.operator.task_id) or {}
        if not build_fields:  # the step failed, or belongs to no single generation
            return OperatorLineage()
        build = Build.of(night_config(), {"generation": build_fields.get("generation", "")})
        shard = self.operator.op_kwargs.get("shard")
        step_datasets = list_step_datasets(step, FinishedStep(build, shard, build_fields))
        return OperatorLineage(
            inputs=[_input_dataset(dataset) for dataset in step_datasets.inputs],
            outputs=[_output_dataset(dataset) for dataset in step_datasets.outputs],
        )

    @property
    def _step(self) -> str | None:
        """Return the step that the task runs; None for tasks of other DAGs and tasks that run no step."""
        step_name = _STEP_BY_TASK_ID.get(self.operator.task_id, self.operator.task_id)
        is_night_step = self.operator.dag_id == NIGHTLY_DAG_ID and step_name in (*PRELIMINARY_STEPS, *NIGHT_STEPS)
        return step_name if is_night_step else None


def is_build_argument(argument: object) -> bool:
    """Return True if a task's argument describes the generation that the task works on."""
    return isinstance(argument, Mapping) and "generation" in argument


def _input_dataset(dataset: StepDataset) -> InputDataset:
    input_facets: dict[str, Any] = {}
    if (dataset.rows, dataset.size_bytes, dataset.files) != (None, None, None):
        input_facets["inputStatistics"] = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(
            rowCount=dataset.rows, size=dataset.size_bytes, fileCount=dataset.files
        )
    if dataset.checks:
        input_facets["dataQualityAssertions"] = data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet(
            [_assertion(check) for check in dataset.checks]
        )
    return InputDataset(
        dataset.name.namespace, dataset.name.name, facets=_dataset_facets(dataset), inputFacets=input_facets
    )


def _output_dataset(dataset: StepDataset) -> OutputDataset:
    output_facets: dict[str, Any] = {}
    if (dataset.rows, dataset.size_bytes, dataset.files) != (None, None, None):
        output_facets["outputStatistics"] = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            rowCount=dataset.rows, size=dataset.size_bytes, fileCount=dataset.files
        )
    return OutputDataset(
        dataset.name.namespace, dataset.name.name, facets=_dataset_facets(dataset), outputFacets=output_facets
    )


def _dataset_facets(dataset: StepDataset) -> dict[str, DatasetFacet]:
    dataset_facets: dict[str, DatasetFacet] = {}
    if dataset.version is not None:
        dataset_facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(dataset.version)
    if dataset.location is not None:
        location_identifier = symlinks_dataset.Identifier(dataset.location.namespace, dataset.location.name, "LOCATION")
        dataset_facets["symlinks"] = symlinks_dataset.SymlinksDatasetFacet([location_identifier])
    return dataset_facets


def _assertion(check: Check) -> data_quality_assertions_dataset.Assertion:
    return data_quality_assertions_dataset.Assertion(
        assertion=check.gate_rule,
        success=check.is_passed,
        severity="error" if check.blocks else "warn",
        description=check.note or None,
        expected=str(check.threshold),
        actual=str(check.measured_value),
    )
