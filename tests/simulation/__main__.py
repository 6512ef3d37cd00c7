"""`python -m tests.simulation SEED`: run one simulation step by step; shrink a failure to its fewest steps."""

import argparse
import sys
import time

from tests.simulation.leftovers import Broken
from tests.simulation.scenarios import scenario
from tests.simulation.shrinking import format_failure, shrunk
from tests.simulation.simulation import START, Simulation, installed


def main() -> int:
    """Run the simulation; return 1 if a rule broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="the seed, which repeats all that happens")
    seed = parser.parse_args().seed
    with installed():
        simulation, started_at = Simulation(seed, scenario(seed)), time.perf_counter()
        try:
            digest = simulation.run()
        except Broken as error:
            print("\n".join(simulation.lines))
            print(f"\nseed {seed}: {error}\n\nmaking it small ...", file=sys.stderr)
            print(format_failure(seed, shrunk(seed, simulation.steps)))
            return 1
    virtual_s, seconds = simulation.loop.time() - START, time.perf_counter() - started_at
    print("\n".join(simulation.lines))
    print(f"\nseed {seed}: history {digest}, {virtual_s:.0f} s in {seconds:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
