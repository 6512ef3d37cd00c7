"""A night of an experiment's arm has the control's events, by the bytes of the control's own night."""

from dataclasses import replace

from cache.config.events import EventsConfig
from cache.store.artefacts import read_manifest
from precompute.builds.build import Build
from tests.integration.changed.month import Month
from tests.integration.nights import publish_night
from tests.integration.taking.clicking import click, some, taken
from tests.integration.taking.test_nights import same_bytes


def test_nights_of_an_arm_have_the_events_of_its_control(featured: Month) -> None:
    own = featured.config
    events = EventsConfig(enabled=True, namespace=own.namespace)
    arm = replace(own, namespace=f"{own.namespace}-b", events=events)
    click(own, some(featured, "a", 20))
    taken(own)
    click(own, some(featured, "b", 20))

    theirs = publish_night(arm, featured.cut.isoformat())  # takes the rest over
    ours = featured.publish()

    builds = Build(own, own.store(), ours), Build(arm, arm.store(), theirs)
    assert same_bytes(*builds) == []
    mine, other = (read_manifest(each.store, each.generation).events for each in builds)
    assert mine is not None and other is not None and mine.until == other.until
    assert (mine.namespace, other.namespace) == ("", own.namespace)
    assert builds[0].need("begin")["events"] == builds[1].need("begin")["events"]
    assert builds[0].need("begin")["events"]["files"] == 2
