"""A night of an experiment's arm has the control's events, by the bytes of the control's own night."""

from dataclasses import replace

from cache.config.events import EventsConfig
from cache.store.artefacts import read_manifest
from precompute.builds.build import Build
from precompute.builds.reports import BEGIN_REPORT
from tests.integration.changed.month import Month
from tests.integration.nights import publish_night
from tests.integration.taking.clicking import click, draw_mixed_events, take_all_events
from tests.integration.taking.test_nights import same_bytes


def test_nights_of_an_arm_have_the_events_of_its_control(featured: Month) -> None:
    control_config = featured.config
    events = EventsConfig(enabled=True, namespace=control_config.namespace)
    arm = replace(control_config, namespace=f"{control_config.namespace}-b", events=events)
    click(control_config, draw_mixed_events(featured, "a", 20))
    take_all_events(control_config)
    click(control_config, draw_mixed_events(featured, "b", 20))

    theirs = publish_night(arm, featured.cut.isoformat())  # takes the rest over
    control_generation = featured.publish()

    builds = (Build(control_config, control_config.store(), control_generation), Build(arm, arm.store(), theirs))
    assert same_bytes(*builds) == []
    mine, arm_events = (read_manifest(build.store, build.generation).events for build in builds)
    assert mine is not None and arm_events is not None and mine.until == arm_events.until
    assert (mine.namespace, arm_events.namespace) == ("", control_config.namespace)
    assert builds[0].need_report(BEGIN_REPORT)["events"] == builds[1].need_report(BEGIN_REPORT)["events"]
    assert builds[0].need_report(BEGIN_REPORT)["events"]["files"] == 2
