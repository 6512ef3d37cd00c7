"""Whether inputs of ids that the night does not know come again: where they never do, looking them up is in vain."""

WINDOW = 1_024
"""Inputs after which is judged; then each that was counted counts for half as much."""
RARELY = 0.01
"""Share of inputs that came again below which overlays are left unread."""
OFTEN = 0.02
"""Of a window, above which all are read again, at once."""
PROBE_EVERY = 16
"""Of the inputs whose overlays are left unread, one in so many is looked up all the same, and nobody waits for it."""


class Repeats:
    """Counts inputs while all overlays are read, and probes while they are not.

    Answers are stored either way, so a probe finds whatever any process has answered before, and 20 of them are enough
    to read everything again.
    """

    def __init__(self) -> None:
        self.spared = 0
        """Overlays left unread."""
        self.are_rare = False
        self._inputs = 0.0
        self._again = 0.0

    def spare(self) -> bool:
        """Counts an overlay that is left unread; whether to probe for it."""
        self.spared += 1
        return self.spared % PROBE_EVERY == 0

    def saw(self, again: bool) -> None:
        """An input whose answer was there or under way, or was not."""
        if not self.are_rare:
            self._count(again)

    def probed(self, again: bool) -> None:
        """What a probe found."""
        if self.are_rare:
            self._count(again)

    def _count(self, again: bool) -> None:
        self._inputs += 1
        self._again += again
        if self.are_rare and self._again >= OFTEN * WINDOW:
            self.are_rare = False
        elif self._inputs >= WINDOW:
            self.are_rare = self._again < RARELY * self._inputs
        else:
            return
        self._inputs /= 2
        self._again /= 2
