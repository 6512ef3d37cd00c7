"""Steps of a night, in their order: the DAG, the shell, the manifest's timings and the dashboard follow this list."""

from itertools import chain

STAGES = (
    ("begin",),
    ("embed_items",),
    ("score",),
    ("assemble",),
    ("index", "quantize"),
    ("load",),
    ("verify",),
    ("publish",),
    ("warm",),
    ("retire",),
)
"""Stages of a night, one after the other; the steps of one stage run side by side."""

PRELIMINARY_STEPS = ("take_events",)
"""Steps before the night's own, where events are taken in: no generation has a name yet."""

NIGHT = tuple(chain.from_iterable(STAGES))
"""Names of all steps: of their modules in `precompute.steps`, their reports, and their times."""

SEALED_BY = "load"
"""The first step that needs the manifest: it holds reports and times of the steps before."""

TIMED_APART = ("assemble", "load", "publish", "warm")
"""Steps with a file of their own for their times, beside the manifest's (`verify` adds its own there)."""
