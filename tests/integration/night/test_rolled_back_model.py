"""A roll back from a worse model says that the next night uses that model again, and so does the night."""

from dataclasses import replace
from pathlib import Path

from cache.store.artefacts import read_manifest
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT
from precompute.bundles.bundle import Bundle
from precompute.bundles.bundle_store import hand_over
from precompute.config.settings import GateThresholds, NightConfig
from precompute.releases.recovery import roll_back
from precompute.steps import begin
from tests.integration.corpus import retrain
from tests.integration.nights import DATA_UNTIL, NEXT, prepare, publish_night

LATER = ("2026-01-30T06:00:00Z", "2026-01-30T12:00:00Z")
LENIENT = GateThresholds(list_jaccard_retrained=0.0, score_psi_retrained=1e9, heldout_of_live=0.0)


def begun_with(config: NightConfig, cut: str) -> tuple[str, list[str]]:
    """The digest of the bundle that a night of this cut uses, and the remarks of its `begin`."""
    begun = begin.run(config, data_until=cut, run_after=None)
    report = Build(config, config.store(), begun["generation"]).need_report(BEGIN_REPORT)
    return str(report["bundle_digest"]), list(report["remarks"])


def test_the_model_that_was_left_is_told_by_the_roll_back_and_by_the_night(tmp_path: Path, redis_url: str) -> None:
    # Given a generation of one model, and then one of another
    config = replace(prepare(tmp_path / "n", redis_url, users=80, items=50), gates=LENIENT)
    store = config.store()
    first = publish_night(config, DATA_UNTIL)
    retrain(config, seed=1, data_until=DATA_UNTIL)
    second = publish_night(config, NEXT)
    earlier, later = (read_manifest(store, name).bundle_digest for name in (first, second))
    assert earlier != later

    # When the second is rolled back
    report = roll_back(config, target_generation=None, reason="worse", attempt="a")

    # Then the report says what the next night uses, and how to go back to the earlier model
    (note,) = report["notes"]
    folder = f"{store.local_folder}/generations/{first}/bundle"
    assert f"the next night uses the model of {second} again" in note
    assert f"`larder hand-over {folder}`" in note

    # And the night uses it all the same, with a remark
    remark = f"uses the model of {second}, which was rolled back: worse"
    digest, remarks = begun_with(config, LATER[0])
    assert digest == later and remark in remarks

    # And once the earlier one is handed over, nights use that, without a remark
    hand_over(store, Bundle.open(Path(folder)))
    digest, remarks = begun_with(config, LATER[1])
    assert digest == earlier and remark not in remarks


def test_a_roll_back_for_the_data_says_nothing_of_the_model(tmp_path: Path, redis_url: str) -> None:
    config = replace(prepare(tmp_path / "n", redis_url, users=80, items=50), gates=LENIENT)
    publish_night(config, DATA_UNTIL)
    second = publish_night(config, NEXT)

    report = roll_back(config, target_generation=None, reason="wrong rows", attempt="a")

    assert "notes" not in report
    _, remarks = begun_with(config, LATER[0])
    assert not any(second in remark for remark in remarks)
