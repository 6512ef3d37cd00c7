"""Garbage collection settings: how often Python looks for cycles while requests are under way."""

import gc

YOUNG = 5_000
"""Objects before the young are looked through. By Python's own 700 that happened several times within one batch, whose
objects are all still in use. In a service whose objects lie all over its memory 25,000 took 4 to 14 ms, with every
request waiting; 5,000 take 1 to 3 ms."""
MIDDLE = 100
"""Looks at the young before those that outlived one are looked through as well: 85 ms for 130,000 objects, nearly all
of them connections and L1 entries, of which at most a few dozen were garbage."""


def settle() -> None:
    """Freezes what exists now, which is never looked at again: walking it held every request for 50 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, gc.get_threshold()[2])
