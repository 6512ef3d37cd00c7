"""Scenarios: changes made to a shop while its answers are judged."""

from __future__ import annotations

from tests.audit.scenarios.access import run_access
from tests.audit.scenarios.forms import run_forms
from tests.audit.scenarios.intake import run_intake
from tests.audit.scenarios.mixes import run_mix, run_small
from tests.audit.scenarios.nights import run_nights
from tests.audit.scenarios.releases import run_canary, run_experiment
from tests.audit.scenarios.stage import Scenario

SCENARIOS: dict[str, Scenario] = {
    "mix": run_mix,
    "canary": run_canary,
    "experiment": run_experiment,
    "intake": run_intake,
    "access": run_access,
    "forms": run_forms,
    "nights": run_nights,
    "small": run_small,
}
"""Scenarios by name."""

ALL = [name for name in SCENARIOS if name != "small"]
"""Names of what an audit runs by default; the mix does all that the small one does."""
