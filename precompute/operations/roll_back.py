"""A roll back: readers moved to an earlier generation, whose pages are repaired after."""

from cache.errors import LarderError
from cache.store.audit import audited
from precompute.bulk.governor import open_governor
from precompute.config.progress import Step
from precompute.config.settings import NightConfig
from precompute.config.validation import demand_reason
from precompute.control.control_keys import translated
from precompute.releases.registry import open_releases


def roll_back(config: NightConfig, *, to: str | None, reason: str, attempt: str) -> Step:
    """Make an earlier generation live again (the previous one unless named), then repair damaged pages of it.

    Waits for no replica and reads no page before the move. What cannot be repaired after it is told as `unmended`:
    readers have moved by then.
    """
    reason = demand_reason("a roll back", reason)
    with open_releases(config) as releases:
        with audited(
            releases.store, "roll_back", f"to {to or 'the previous one'}", actor=config.actor, reason=reason,
            attempt=attempt,
        ) as audit_facts:  # fmt: skip
            moved = releases.roll_back(to=to, reason=reason, attempt=attempt)
            pointer = moved.pointer
            audit_facts |= {"generation": pointer.generation, "changed": moved.has_moved}
        report: Step = {
            "generation": pointer.generation, "epoch": pointer.epoch, "previous": pointer.previous,
            "changed": moved.has_moved, "mended": [],
        }  # fmt: skip
        try:
            with (
                translated(),
                # Right beside the flip: going slower is better than being felt.
                open_governor(config.governor, releases.control, awake=False) as governor,
            ):
                report["mended"] = releases.mend(pointer.generation, governor=governor)
        except (LarderError, OSError) as error:
            report["unmended"] = str(error)
            report["next"] = (
                f"readers follow {pointer.generation}, but its pages could not all be read back and repaired: once "
                "that is possible, run `larder restore`"
            )
    return report
