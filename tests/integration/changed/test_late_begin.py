"""A `begin` that ends behind the next step may have chosen another base than that step compared the items with."""

from pathlib import Path

from precompute.builds.reports import BEGIN_REPORT
from precompute.steps import begin, embed_items, score
from tests.integration.changed import events
from tests.integration.changed.worlds import reference


def test_a_late_begin_with_another_base_renumbers_nothing_wrongly(tmp_path: Path, redis_url: str) -> None:
    month = reference(tmp_path / "night", redis_url, 7, users=120)
    earlier = month.publish()
    month.night = 1
    events.ITEMS_REMOVED.happen(month)
    events.USUAL.happen(month)
    month.publish()
    month.night = 2
    events.USUAL.happen(month)
    full = month.compute()

    build = begin.run(month.config, data_until=month.cut.isoformat(), run_after=None)
    embed_items.run(month.config, build)
    generation = str(build["generation"])
    generation_build = month.build(generation)
    begin_report = generation_build.need_report(BEGIN_REPORT)
    assert begin_report["base"]["generation"] != earlier
    begin_report["base"] = {**begin_report["base"], "generation": earlier, "took_over": False}
    generation_build.report(BEGIN_REPORT, begin_report)
    score.run(month.config, build, build["shards"])

    assert month.differences(generation, full) == []
