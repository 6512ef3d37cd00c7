"""Whole lists of a GPU beside the processor's, bit for bit: 100,000 users by a million items, histories out.

Gaussian vectors of 128 numbers, K = 100. Nothing is timed: where a list differs the bench fails, and names its first
user. LARDER_DEVICE chooses another device than the first GPU (`cpu`: torch's processor device, in a size for it);
without any nothing is compared.
"""

import os

import numpy as np

from cache.topk.topk import Scorer
from precompute.config.devices import devices
from tests.bench.gpu import K, draw_case
from tests.bench.tools.harness import Report, parse

SIZES = {"gpu": (100_000, 1_000_000), "gpu quick": (20_000, 262_144), "processor": (500, 8_192)}
STEP = 4_000
"""Users whose lists the processor makes at once."""


def main() -> None:
    """Compare and report; without a device only say so."""
    options = parse(__doc__.splitlines()[0])
    report = Report("equal", ("torch",))
    device_names = devices(os.environ.get("LARDER_DEVICE", "auto"))
    report.figures["device"] = device_names[0] if device_names else "none: nothing is measured"
    if device_names:
        from precompute.device.scorer import DeviceScorer

        kind = "processor" if device_names[0] == "cpu" else "gpu quick" if options.quick else "gpu"
        users, items = SIZES[kind]
        case = draw_case(users, items, 128)
        scorer = DeviceScorer.of(case.items, "inner_product", device_names[0])
        if scorer is None:
            raise SystemExit(f"{device_names[0]} cannot be used: the log says why")
        ordinals, scores = scorer.top(case.users, K, case.histories)
        theirs = Scorer.of(case.items)
        for start in range(0, users, STEP):
            rows = np.arange(start, min(start + STEP, users))
            expected_lists = theirs.top(case.users[rows], K, case.histories.select_rows(rows))
            is_equal = (ordinals[rows] == expected_lists[0]).all(1)
            is_equal &= (scores[rows].view(np.uint32) == expected_lists[1].view(np.uint32)).all(1)
            if not is_equal.all():
                raise SystemExit(f"the lists of {device_names[0]} differ, first that of user {rows[~is_equal][0]}")
        if scorer.has_failed:
            raise SystemExit(f"{device_names[0]} failed: the log says why")
        report.figures |= {"users": users, "items": items, "equal_users": users}
    report.show(options)


if __name__ == "__main__":
    main()
