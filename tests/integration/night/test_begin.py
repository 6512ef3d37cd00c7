"""What begin refuses before hours of work, and what of a first pass over the sources a second one leaves."""

import os
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache.errors import BundleError, ConfigError, Refused, StoreError
from cache.format.item_table import ItemTable
from cache.format.manifest import CUT_CHARS
from cache.model.input_preparation import LiveInput
from cache.model.predictor import Predictor
from cache.records import NO_ITEM, decode_record
from cache.store.night_failure import last_failure
from precompute.builds.build import CUT_FORMAT, Build
from precompute.builds.reports import BEGIN_REPORT, InputFields
from precompute.cli.commands import inputs_change_name
from precompute.config.settings import GateThresholds, NightConfig
from precompute.partitions.holdout import read_holdout
from precompute.partitions.partition import PartitionJob
from precompute.releases.release_log import open_releases
from precompute.sources.columns import Ids
from precompute.sources.readers import Interactions
from precompute.steps import begin, embed_items
from precompute.steps.night import Night, run_night
from tests.integration.nights import DATA_UNTIL, histories, prepare, publish_night, top_lists
from tests.models import externalize_weights
from tests.object_stores import Overwriting
from tests.opened import open_generation


@pytest.fixture
def config(tmp_path: Path, redis_url: str) -> NightConfig:
    return prepare(tmp_path, redis_url, users=60, items=30)


def test_weights_of_a_model_that_the_bundle_does_not_list_are_refused_by_name(config):
    """They would lie in no generation, and every step after this one would fail, hours later."""
    folder = config.path(config.bundle)
    externalize_weights(folder, "user_tower")
    bundle_document = orjson.loads((folder / "bundle.json").read_bytes())
    del bundle_document["user_tower"]["weights"]
    (folder / "bundle.json").write_bytes(orjson.dumps(bundle_document))

    with pytest.raises(BundleError, match=r"user_tower keeps weights in user_tower\.weights") as caught:
        begin.run(config, data_until=DATA_UNTIL, run_after=None)

    assert caught.value.details["model"] == "user_tower"


def test_oddities_of_the_interactions_are_reported_with_the_night_and_kept(config):
    """Counted once, over all rows: by a night that reads all, and by one that copies the first file's partition."""
    table = pq.read_table(config.path("interactions.parquet"))
    bot = pa.array(["0"] * (len(table) // 2), table.schema.field("user").type)
    first_half = table.slice(0, len(bot))
    column_index = table.column_names.index("user")
    pq.write_table(first_half.set_column(column_index, "user", bot), config.path("more.parquet"))
    sources = replace(config.sources, interactions=("interactions.parquet", "more.parquet"))
    config = replace(config, sources=sources)

    build = begin.run(config, data_until=None, run_after=None, named=DATA_UNTIL)
    begin_report = Build(config, config.store(), build["generation"]).need_report(BEGIN_REPORT)

    bot_remarks = [remark for remark in begin_report["remarks"] if "has 3" in remark]
    assert bot_remarks and bot_remarks[0].startswith("one user has 33% of all rows")
    assert any("too little data to judge by" in remark for remark in begin_report["remarks"])
    assert sum(begin_report["rows"]["user_rows"]) == begin_report["interactions"]


def test_sub_steps_report_the_fields_that_the_lists_name(config):
    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)

    begin_report = Build(config, config.store(), build["generation"]).need_report(BEGIN_REPORT)

    sub_steps = (*begin.READING, *begin.AFTER_READING)
    named_fields = {field for sub_step in sub_steps for field in sub_step.report_fields_class.__annotations__}
    known_before = {*InputFields.__annotations__}
    # `facets` is there only if settings have some, and `unknown_items_named` only if there are many.
    expected_fields = {*begin_report, "facets", "unknown_items_named"} - {"seconds"}
    assert named_fields | known_before == expected_fields


def test_a_copy_of_a_file_is_reported_with_the_night(config):
    copy = config.path("again.parquet")
    copy.write_bytes(config.path("interactions.parquet").read_bytes())
    sources = replace(config.sources, interactions=("interactions.parquet", "again.parquet"))

    build = begin.run(replace(config, sources=sources), data_until=DATA_UNTIL, run_after=None)

    remarks = Build(config, config.store(), build["generation"]).need_report(BEGIN_REPORT)["remarks"]
    expected_remark = "interactions.parquet and again.parquet hold the same bytes, so their rows count 2 times"
    assert any(remark.startswith(expected_remark) for remark in remarks)


def test_a_cut_of_interactions_without_times_is_said(config):
    """A cut left nothing out, and the night said nothing."""
    path = config.path("interactions.parquet")
    table = pq.read_table(path)
    zeros = pa.array([0] * len(table), table.schema.field("timestamp").type)
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", zeros), path)
    without_column = replace(config, sources=replace(config.sources, timestamp_column=""))

    for untimed in (config, without_column):
        for data_until, run_after in ((DATA_UNTIL, None), (None, DATA_UNTIL)):
            build = begin.run(untimed, data_until=data_until, run_after=run_after)
            remarks = Build(untimed, untimed.store(), build["generation"]).need_report(BEGIN_REPORT)["remarks"]
            expected_remark = f"the cut {DATA_UNTIL} leaves no interaction out"
            assert any(remark.startswith(expected_remark) for remark in remarks)


def test_ids_in_two_forms_are_reported_with_the_night_whichever_table_has_them(config):
    path = config.path("interactions.parquet")
    table = pq.read_table(path)
    users, items = (table[name].to_pylist() for name in ("user", "item"))
    other_user, other_item = users[-1].upper() + " ", items[-1].upper() + " "
    more = table.slice(0, 1)
    for name, value in (("user", other_user), ("item", other_item)):
        column = pa.array([value], table.schema.field(name).type)
        more = more.set_column(more.column_names.index(name), name, column)
    pq.write_table(pa.concat_tables([table, more]), path)

    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    report = Build(config, config.store(), build["generation"]).need_report(BEGIN_REPORT)["unusable"]

    remarks = report["ids"]["remarks"]
    assert any(remark.startswith("1 user comes in more than one form") for remark in remarks)
    assert any(remark.startswith("1 item comes in more than one form") for remark in remarks)
    assert {other_user, other_item, users[-1], items[-1]} <= {*report["ids"]["named"]}


def test_a_refusal_over_few_users_and_items_says_that_there_are_few(config):
    config = replace(config, gates=GateThresholds(distinct_lists=2.0))

    with pytest.raises(Refused, match="stays: too little data to judge by: 60 users and 30 items"):
        publish_night(config, DATA_UNTIL)


@pytest.mark.parametrize(("trained", "is_reported"), [("2100-01-01", True), ("1999-01-01", False)])
def test_a_model_that_learnt_its_test_data_is_reported(config, trained, is_reported):
    path = config.path(config.bundle) / "bundle.json"
    bundle_document = orjson.loads(path.read_bytes())
    bundle_document["training"]["trained_until"] = f"{trained}T00:00:00+00:00"
    path.write_bytes(orjson.dumps(bundle_document))

    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    remarks = Build(config, config.store(), build["generation"]).need_report(BEGIN_REPORT)["remarks"]

    assert any("trained on interactions up to 2100" in remark for remark in remarks) is is_reported


def test_a_file_from_the_future_names_no_generation(config):
    """A clock that was ahead when files were copied: each night after that one was refused as older than it."""
    os.utime(config.path("interactions.parquet"), (4_000_000_000, 4_000_000_000))

    build = begin.run(config, data_until=None, run_after=None, named=inputs_change_name(config, None))

    with open_releases(config) as releases:
        clock_time = datetime.fromtimestamp(releases.clock(), UTC)
    named = datetime.strptime(build["generation"][:CUT_CHARS], CUT_FORMAT).replace(tzinfo=UTC)
    assert clock_time - timedelta(minutes=5) < named <= clock_time


def test_a_night_of_models_with_external_weights_is_the_night_without(config, tmp_path):
    inside = publish_night(config, DATA_UNTIL)
    lists = top_lists(config, inside, sorted(histories(config)))
    for name in ("user_tower", "item_tower"):
        externalize_weights(config.path(config.bundle), name)

    outside = publish_night(config, DATA_UNTIL)

    assert top_lists(config, outside, sorted(histories(config))) == lists
    manifest, root = open_generation(config.store(), outside)
    inside_manifest, _ = open_generation(config.store(), inside)
    assert (inside_manifest.format, manifest.format) == (1, 2)
    user, was = manifest.models["user_tower"], inside_manifest.models["user_tower"]
    assert [artefact.path for artefact in user.fp32_files] == [
        "models/user_tower.fp32.onnx", "models/user_tower.weights",
    ]  # fmt: skip
    assert user.int8 and was.int8 and user.int8.sha256 == was.int8.sha256 and user.digest != was.digest
    assert set(user.fp32_files) < set(manifest.served_artefacts())
    items = ItemTable.open(root, manifest)
    for user_id, item_ids in list(lists.items())[:5]:
        live_input = LiveInput(tuple(item_id.encode() for item_id in histories(config)[user_id]))
        predictor = Predictor.open(manifest, root, items, precision="fp32")
        prepared = predictor.prepare("user_topk", live_input)
        assert prepared is not None
        record = predictor.predict("user_topk", [prepared], [1], 0)[0]
        item_ordinals = decode_record(manifest.tables["user_topk"].layout, record).item_ordinals
        assert (
            item_ordinals is not None
            and items.ids_of(item_ordinals[item_ordinals != NO_ITEM])[:5] == list(item_ids)[:5]
        )


def test_weights_that_changed_since_the_night_began_are_refused(config):
    externalize_weights(config.path(config.bundle), "item_tower")
    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    path = config.store().local(f"generations/{build['generation']}/models/item_tower.weights")
    path.write_bytes(path.read_bytes()[:-1] + b"x")

    with pytest.raises(BundleError, match=r"item_tower\.weights has SHA-256"):
        embed_items.run(config, build)


def test_no_night_of_such_a_model_begins_while_a_replica_cannot_read_it(config):
    externalize_weights(config.path(config.bundle), "user_tower")
    with open_releases(config) as releases:
        beat: dict[str, object] = {"replica": "old", "serving": None, "holds": []}
        keys, beat_at = releases.control.keyspace, releases.control.time()
        releases.control.client.zadd(keys.replicas, {orjson.dumps(beat): beat_at})

    with pytest.raises(Refused, match=r"old \(Larder 0\.1\.0\) reads manifest format 1, a night of a"):
        begin.run(config, data_until=DATA_UNTIL, run_after=None)


def test_a_store_that_lets_the_last_writer_win_is_refused_before_anything_is_read(config, monkeypatch):
    for reader in ("chosen_bundle", "digest_files"):
        monkeypatch.setattr(begin, reader, lambda _of, reader=reader: pytest.fail(reader))
    overwriting = f"{Overwriting.protocol}://{uuid.uuid4().hex}"

    with pytest.raises(StoreError, match="does not create objects exclusively"):
        begin.run(replace(config, artifacts=overwriting), data_until=DATA_UNTIL, run_after=None)


def test_a_second_pass_over_the_sources_leaves_nothing_of_the_first_in_the_holdout(config, monkeypatch):
    single_pass_build = Build.of(config, begin.run(config, data_until=DATA_UNTIL, run_after=None))
    of_first = Ids.of(pa.array(["of the first pass"]))

    run = PartitionJob.run

    def run_twice(job, earlier):
        job.holdout.add(Interactions(of_first, of_first, np.zeros(1, np.int64)))
        job.holdout.restart()
        return run(job, earlier)

    monkeypatch.setattr(PartitionJob, "run", run_twice)
    twice = replace(config, namespace=f"{config.namespace}-twice")
    two_pass_build = Build.of(twice, begin.run(twice, data_until=DATA_UNTIL, run_after=None))

    assert read_holdout(two_pass_build.root) == read_holdout(single_pass_build.root) != {}


def other_form(config: NightConfig, share: float) -> None:
    """Writes the first clicks' items in another form than the catalogue has."""
    path = config.path("interactions.parquet")
    table = pq.read_table(path)
    items = [str(item_id) for item_id in table.column("item").to_pylist()]
    count = int(share * len(items))
    renamed = [f"sku-{item_id}" for item_id in items[:count]] + items[count:]
    column_index = table.column_names.index("item")
    pq.write_table(table.set_column(column_index, "item", pa.array(renamed)), path)


def test_clicks_whose_items_have_another_form_are_told_with_the_night_and_refused(config):
    """Published with all gates green, and no word: only the manifest had their number."""
    other_form(config, 0.7)

    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    remarks = Build(config, config.store(), build["generation"]).need_report(BEGIN_REPORT)["remarks"]

    (remark,) = [remark for remark in remarks if "does not have" in remark]
    assert "% of the interactions name items that the catalogue (items.parquet) does not" in remark
    assert "interactions have 'sku-" in remark and "[sources] item_column" in remark

    lenient = replace(config.gates, coverage_of_source=0.0)
    with pytest.raises(Refused, match=r"unknown_items is 0\.\d+, the threshold 0\.5") as refusal:
        publish_night(replace(config, gates=lenient), DATA_UNTIL)

    assert "such as 'sku-" in str(refusal.value)


def test_a_fifth_of_the_clicks_on_items_that_went_is_told_and_passes(config):
    other_form(config, 0.25)

    build = begin.run(config, data_until=DATA_UNTIL, run_after=None)
    remarks = Build(config, config.store(), build["generation"]).need_report(BEGIN_REPORT)["remarks"]

    assert any("of the interactions name items" in remark for remark in remarks)
    lenient = replace(config.gates, coverage_of_source=0.0)
    publish_night(replace(config, gates=lenient), DATA_UNTIL)


def test_a_run_before_what_is_live_computes_nothing_and_records_no_failure(config):
    live = publish_night(config, DATA_UNTIL)
    earlier = "2026-01-28T00:00:00Z"

    scheduled = begin.run(config, data_until=None, run_after=earlier)
    by_hand = begin.run(config, data_until=None, run_after=None, named=earlier)

    for build in (scheduled, by_hand):
        assert (build["generation"], build["already_live"]) == (live, True)
    assert "newer than this run's time 2026-01-28T00:00:00+00:00" in scheduled["nothing_newer"]
    assert "no input is newer" in by_hand["nothing_newer"]
    steps = run_night(Night(config, "again", named=earlier))
    assert [(name, row.result_summary) for name, row, _ in steps] == [("begin", by_hand["nothing_newer"])]
    assert last_failure(config.store()) is None
    with pytest.raises(ConfigError, match="is older than"):
        begin.run(config, data_until=earlier, run_after=None)
