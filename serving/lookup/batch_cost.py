"""Cost of a batch of the model in seconds, learned from the recent ones. Pure."""

_FORGET = 0.95
"""Weight that each further batch leaves to those before it: about the last twenty count."""


class BatchCost:
    """Seconds of a batch as `fixed + each * size`: a least-squares line whose evidence fades."""

    def __init__(self) -> None:
        self._weight = self._sizes = self._seconds = self._squares = self._products = 0.0
        self._faded = 1.0

    def add(self, size: int, seconds: float) -> None:
        """Adds a batch's size and seconds; what was doubted and proves far off is forgotten at once."""
        if self._faded < 1 and seconds < self.of(size) / self._faded / 2:
            self._weight = self._sizes = self._seconds = self._squares = self._products = 0.0
        self._faded = 1.0
        self._weight = self._weight * _FORGET + 1
        self._sizes = self._sizes * _FORGET + size
        self._seconds = self._seconds * _FORGET + seconds
        self._squares = self._squares * _FORGET + size * size
        self._products = self._products * _FORGET + size * seconds

    def fade(self) -> None:
        """Believe the estimate a little less: what it keeps from running could never prove it wrong."""
        self._faded *= 0.9

    def of(self, size: int) -> float:
        """Seconds that a batch of this size is expected to take; 0 while nothing is known."""
        fixed, per_input_s = self._line()
        return (fixed + per_input_s * size) * self._faded

    def size_within(self, seconds: float, size_max: int) -> int:
        """The most inputs, up to `size_max`, of which a batch is expected to end in time."""
        fixed, per_input_s = self._line()
        remaining_s = seconds / self._faded - fixed
        if remaining_s < 0:
            return 0
        return size_max if remaining_s >= per_input_s * size_max else int(remaining_s / per_input_s)

    def _line(self) -> tuple[float, float]:
        if not self._weight:
            return 0.0, 0.0
        size, seconds = self._sizes / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - size * size
        if spread < 0.01 * size:  # sizes were all alike: nothing tells the two parts apart
            return seconds, 0.0
        per_input_s = (self._products / self._weight - size * seconds) / spread
        per_input_s = min(max(per_input_s, 0.0), seconds / size)
        return seconds - per_input_s * size, per_input_s
