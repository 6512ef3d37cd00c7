"""Repeat rate of inputs of ids that the night does not know: where none comes again, looking up is in vain."""

WINDOW = 1_024
"""Inputs after which is judged; then each that was counted counts for half as much."""
RARELY = 0.01
"""Share of inputs that came again below which overlays are left unread."""
OFTEN = 0.02
"""Share of a window's inputs that came again above which all overlays are read again, at once."""
PROBE_EVERY = 16
"""Inputs whose overlays are left unread, per probe: one is looked up all the same, and nobody waits for it."""


class RepeatRate:
    """Counts inputs while all overlays are read, and probes while they are not.

    Answers are stored either way, so a probe finds whatever any process has answered before, and 20 of them are enough
    to read everything again.
    """

    def __init__(self) -> None:
        self.spared = 0
        """Overlays left unread."""
        self.are_rare = False
        self._inputs = 0.0
        self._repeat_weight = 0.0

    def spare(self) -> bool:
        """Counts an overlay that is left unread; returns whether to probe for it."""
        self.spared += 1
        return self.spared % PROBE_EVERY == 0

    def saw(self, is_repeat: bool) -> None:
        """Counts an input whose answer was there or under way, or was not, while all overlays are read."""
        if not self.are_rare:
            self._count(is_repeat)

    def probed(self, is_repeat: bool) -> None:
        """Counts what a probe found, while overlays are left unread."""
        if self.are_rare:
            self._count(is_repeat)

    def _count(self, is_repeat: bool) -> None:
        self._inputs += 1
        self._repeat_weight += is_repeat
        if self.are_rare and self._repeat_weight >= OFTEN * WINDOW:
            self.are_rare = False
        elif self._inputs >= WINDOW:
            self.are_rare = self._repeat_weight < RARELY * self._inputs
        else:
            return
        self._inputs /= 2
        self._repeat_weight /= 2
