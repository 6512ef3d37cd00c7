"""`larder experiment` over a real Redis: started, shared out anew, stopped; what is refused before it is written."""

import argparse
from dataclasses import replace
from typing import Any

import orjson
import pytest

from cache.config.night import FlipConfig, TableConfig
from cache.control.control_keys import Control
from cache.errors import ConfigError, Conflict
from cache.format.manifest import IncludedEvents, Manifest, NamedFilter
from cache.l2.sync_clients import connect
from cache.store.audit import audit_records
from cache.traffic.experiments import latest_experiments
from precompute.cli.parser import build_command_parser
from precompute.config.progress import quiet
from precompute.config.settings import NightConfig
from precompute.traffic import experiments
from precompute.traffic.experiments import demand_match, published_manifest
from tests.integration.fleet import control_of
from tests.integration.nights import DATA_UNTIL, build_night, publish_night

ARMS = ("--arm", "control={own}:0.5", "--arm", "other={arm}:0.5")


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> tuple[NightConfig, NightConfig]:
    """The service's own namespace and an arm's: one store, one Redis, a night each."""
    folder = tmp_path_factory.mktemp("experiment")
    own_config = replace(build_night(folder, redis_url, users=40, items=30), flip=FlipConfig(wait_s=0.3))
    arm = replace(own_config, namespace=f"{own_config.namespace}-b", page_bytes=8 * 1024)
    publish_night(arm, DATA_UNTIL)
    return own_config, arm


def run(configs: tuple[NightConfig, NightConfig], *command_parts: str) -> dict[str, Any]:
    """What the command says, as its JSON."""
    own_config, arm = configs
    named = [part.format(own=own_config.namespace, arm=arm.namespace) for part in command_parts]
    argv = ["experiment", *named, "--json"]
    arguments: argparse.Namespace = build_command_parser().parse_args(argv)
    output: dict[str, Any] = orjson.loads(orjson.dumps(arguments.run.import_command()(own_config, arguments, quiet)))
    return output


def test_an_experiment_is_started_shared_out_anew_and_stopped(namespaces: tuple[NightConfig, NightConfig]) -> None:
    own_config, arm = namespaces

    started = run(namespaces, "start", "ranker", *ARMS, "--share", "0.2", "--holdout", "0.05")

    assert started["state"] == "running" and started["share"] == 0.2
    assert started["arms"] == [f"control={own_config.namespace}:0.5", f"other={arm.namespace}:0.5"]
    record = latest_experiments(own_config.store())
    assert record.holdout == ((0, 500),) and record.running[0].buckets == ((500, 2500),)
    # A repeated start writes nothing.
    repeated_start = run(namespaces, "start", "ranker", *ARMS, "--share", "0.2")
    assert repeated_start["version"] == started["version"]
    run(namespaces, "share", "ranker", "--share", "0.3", "--arm", "control=0.4", "--arm", "other=0.6")
    record = latest_experiments(own_config.store())
    assert record.running[0].buckets == ((500, 3500),)
    assert [experiment_arm.buckets for experiment_arm in record.running[0].arms] == [((0, 4000),), ((4000, 10_000),)]
    status = run(namespaces, "status")
    assert (status["holdout"], status["free"]) == (0.05, 0.65)
    (experiment_status,) = status["experiments"]
    with control_of(arm) as control:
        pointer = control.read_pointer()
    assert pointer is not None and experiment_status["arms"][1]["generation"] == pointer.generation
    assert run(namespaces, "status", "ranker")["experiments"] == [experiment_status]
    arguments = build_command_parser().parse_args(["experiment", "status"])
    table, summary_text = arguments.run.import_command()(own_config, arguments, quiet)
    assert [list(column.cells)[:2] for column in table.columns[:2]] == [["ranker"] * 2, ["control", "other"]]
    assert summary_text == "holdout 5.00%, free 65.00% of all keys"
    assert run(namespaces, "stop", "ranker", "--reason", "a test")["state"] == "over"
    assert run(namespaces, "stop", "ranker")["state"] == "over"
    assert run(namespaces, "status")["free"] == 0.95
    experiment_audits = [
        audit_record for audit_record in audit_records(own_config.store()) if audit_record.action == "experiment"
    ]
    assert [audit_record.subject for audit_record in experiment_audits] == [
        "start ranker", "start ranker", "share ranker", "stop ranker", "stop ranker",
    ]  # fmt: skip
    assert experiment_audits[3].reason == "a test" and {audit_record.outcome for audit_record in experiment_audits} == {
        "done"
    }


@pytest.mark.parametrize(
    ("command_parts", "error", "error_pattern"),
    [
        (("start", *ARMS), ConfigError, "name the experiment"),
        (("start", "a", "--arm", "control={own}"), ConfigError, "NAME=NAMESPACE:SHARE"),
        (("start", "a", "--arm", "control={own}:much"), ConfigError, "must end with a share"),
        (("start", "a", *ARMS[:3], "other=nowhere:0.5"), Conflict, "nothing is published in namespace 'nowhere'"),
        (("start", "a", *ARMS, "--share", "2"), ConfigError, "--share"),
        (("share", "nobody", "--share", "0.1"), Conflict, "no experiment 'nobody'"),
        (("share", "--share", "0.1"), ConfigError, "name the experiment"),
        (("stop", "nobody"), Conflict, "no experiment 'nobody'"),
        (("status", "nobody"), Conflict, "no experiment 'nobody'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_is_written(
    namespaces: tuple[NightConfig, NightConfig],
    command_parts: tuple[str, ...],
    error: type[Exception],
    error_pattern: str,
) -> None:
    version = latest_experiments(namespaces[0].store()).version

    with pytest.raises(error, match=error_pattern):
        run(namespaces, *command_parts)

    assert latest_experiments(namespaces[0].store()).version == version


def test_arms_of_other_tables_are_refused(namespaces: tuple[NightConfig, NightConfig]) -> None:
    own_config, _ = namespaces
    narrow = {**own_config.tables, "user_topk": TableConfig("user_topk", k=10)}
    less = {name: table_config for name, table_config in own_config.tables.items() if name != "user_affinity"}
    for name, tables, error_pattern in (
        ("narrow", narrow, r"user_topk' is kind topk entity user width 50 in .* user width 10 in"),
        ("less", less, r"user_affinity' is .* and absent in"),
    ):
        arm_config = replace(own_config, namespace=f"{own_config.namespace}-{name}", tables=tables)
        publish_night(arm_config, DATA_UNTIL)
        with pytest.raises(Conflict, match=error_pattern):
            run((own_config, arm_config), "start", "b", *ARMS)


def test_replicas_that_do_not_hold_the_arms_are_waited_for_and_named(
    namespaces: tuple[NightConfig, NightConfig],
) -> None:
    own_config, arm = namespaces
    beat = orjson.dumps({"replica": "r1", "serving": "g", "holds": []})
    with control_of(own_config) as control, control_of(arm) as of_arm:
        control.client.zadd(control.keyspace.replicas, {beat: control.time()})
        with pytest.raises(Conflict, match=f"r1: {arm.namespace}"):
            run(namespaces, "start", "late", *ARMS, "--share", "0.1")
        late_experiment = latest_experiments(own_config.store()).find("late")
        assert late_experiment is not None and not late_experiment.is_running

        for namespace_control in (control, of_arm):
            namespace_control.client.zadd(namespace_control.keyspace.replicas, {beat: control.time()})
        assert run(namespaces, "start", "late", *ARMS, "--share", "0.1")["state"] == "running"
    experiments.stop(own_config, "late")


def test_an_arm_must_have_the_filters_that_are_called_by_name(namespaces: tuple[NightConfig, NightConfig]) -> None:
    own_manifest, arm = (manifest_of(config) for config in namespaces)
    cheap = {"cheap": NamedFilter({"<": ["price", 20]}, {})}

    demand_match(own_manifest, replace(arm, filters=cheap))
    with pytest.raises(Conflict, match=r"has no filters cheap.*\[filters\.NAME\]") as refused:
        demand_match(replace(own_manifest, filters=cheap), arm)

    assert refused.value.details["filters"] == ["cheap"]


def manifest_of(config: NightConfig) -> Manifest:
    with connect(str(config.redis_url), 5.0) as client:
        return published_manifest(config.store(), Control(client, config.keyspace()))


def test_an_arm_must_count_the_events_that_the_control_counts(namespaces: tuple[NightConfig, NightConfig]) -> None:
    own_manifest, arm = (manifest_of(config) for config in namespaces)
    counting_manifest = replace(own_manifest, events=IncludedEvents("5-0", 10))
    its_own = IncludedEvents("5-0", 10)

    demand_match(own_manifest, replace(arm, events=its_own))
    demand_match(counting_manifest, replace(arm, events=IncludedEvents("3-0", 9, namespace=own_manifest.namespace)))
    for events in (None, its_own):
        with pytest.raises(Conflict, match=f'namespace = "{own_manifest.namespace}" in .events.') as refused:
            demand_match(counting_manifest, replace(arm, events=events))
        assert refused.value.details["events"] == own_manifest.namespace
