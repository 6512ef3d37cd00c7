"""Looks at what surrounds Larder: the provider of live models, Airflow, lineage."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from cache.errors import LarderError
from cache.process.extras import install_command, missing
from infra.cli.check.found import CheckResult
from infra.cli.dags import airflow_refusal, airflow_version, dags_folder, files_in

if TYPE_CHECKING:
    from cache.config.night import NightConfig

TRANSPORTS = (
    "AIRFLOW__OPENLINEAGE__TRANSPORT", "AIRFLOW__OPENLINEAGE__CONFIG_PATH", "OPENLINEAGE_URL", "OPENLINEAGE_CONFIG",
)  # fmt: skip
"""Settings that name a transport for events."""
_PROVIDER = "apache-airflow-providers-openlineage"
_EXTRACTORS = "AIRFLOW__OPENLINEAGE__EXTRACTORS"
_EXTRACTOR = "infra.lineage.extractor.NightExtractor"
_AIRFLOW = {
    "missing": "not there",
    "older": "of another release",
    "changed": "changed by hand",
    "foreign": "not ours",
}


def look_at_live(_config: "NightConfig") -> CheckResult:
    """Look for the provider that live models are to run by."""
    from cache.config.serving import ServingConfig

    provider = ServingConfig.load(os.environ).live_provider
    if provider == "cpu":
        return "not used", "live_provider is cpu: live models run on the processor"
    from cache.model.runtime import Accelerator

    if (missing_reason := Accelerator(provider).missing()) is not None:
        return (
            "to do",
            f"live models would run on the processor: {missing_reason}, or set live_provider to cpu",
        )
    return (
        "ok",
        f"{provider}; whether models could be loaded there, `fallback` of /v1/generations says",
    )


def look_at_airflow(_config: "NightConfig") -> CheckResult:
    """Look at the DAG files of an Airflow."""
    if missing("a night", "airflow", "airflow"):
        return (
            "not used",
            "Airflow is not installed here: `larder night` runs a night, from cron for instance",
        )
    installed = airflow_version()
    refusal = None if installed is None else airflow_refusal(installed)
    try:
        folder = dags_folder(None)
    except LarderError:
        return (
            "not used",
            refusal
            or "no AIRFLOW_HOME: `larder dags install FOLDER` adds the nights to an Airflow",
        )
    if refusal is not None:
        return "to do", refusal
    states = {file.target: file.state() for file in files_in(folder)}
    for target, state in states.items():
        if state in ("older", "changed", "foreign", "missing"):
            return "to do", f"{target}: {_AIRFLOW[state]}; `larder dags install`"
    return (
        "ok",
        f"{len(states)} DAGs in {Path(folder)}, Airflow {installed or 'of unknown version'}",
    )


def look_at_lineage(_config: "NightConfig") -> CheckResult:
    """Look at the settings of OpenLineage."""
    if not any(os.environ.get(name) for name in TRANSPORTS):
        return "not used", f"no transport for OpenLineage's events, such as {TRANSPORTS[0]}"
    try:
        version(_PROVIDER)  # its module could only be found by importing Airflow
    except PackageNotFoundError:
        return (
            "to do",
            f"lineage needs {_PROVIDER}, not installed here: {install_command('lineage')}",
        )
    if _EXTRACTOR not in map(str.strip, os.environ.get(_EXTRACTORS, "").split(";")):
        return "to do", f"events say nothing of data: set {_EXTRACTORS}={_EXTRACTOR}"
    return (
        "ok",
        "each task of a night sends OpenLineage's events, where Airflow has this environment",
    )
