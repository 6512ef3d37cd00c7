"""Load shedding by queue delay: the share of some work that may go on, by how long work has to wait. Pure."""

from math import inf

_CLOSE_MOST, _OPEN = 0.1, 0.1
_SHUT = 0.001


class Valve:
    """Valve that admits a share, 0 to 1, of some work and follows one queue.

    The signal is CoDel's (RFC 8289): the shortest wait of an interval. Above `target` even the luckiest had to wait, so
    the queue stands; a burst that drains within the interval does not count. The reaction is of DAGOR's kind (WeChat,
    SoCC 2018): a share of the work goes on. After an interval with a standing queue the share shrinks as `target` is
    to the wait (the gradient of Netflix' concurrency-limits). After each other one it grows by a step, which doubles
    until a queue stands again (TCP's slow start): what is over is over within half a second.
    """

    def __init__(self, target: float, interval_s: float) -> None:
        self.target = target
        self.admitted_share = 1.0
        self.wait = 0.0
        """The shortest wait of the interval before, in the unit of `target`."""
        self._interval_s = interval_s
        self._shortest_wait, self._interval_began_at = inf, 0.0
        self._step, self._credit = _OPEN, 0.0

    def observe(self, wait: float, now_s: float) -> None:
        """Takes one sample of the wait, in the unit of `target`; `now_s` in seconds.

        An interval has two at least, as one long pause is not a queue: the last of one is the first of the next, so
        that where samples are rare each of them is judged.
        """
        if self._shortest_wait == inf:
            self._interval_began_at = now_s
        self._shortest_wait = min(self._shortest_wait, wait)
        if now_s - self._interval_began_at < self._interval_s:
            return
        self.wait = self._shortest_wait
        if self.wait <= self.target:
            self.admitted_share = min(1.0, self.admitted_share + self._step)
            self._step = min(1.0, 2 * self._step)
        else:
            self._step = _OPEN
            self.admitted_share *= max(_CLOSE_MOST, self.target / self.wait)
            if self.admitted_share < _SHUT:
                self.admitted_share = 0.0
        self._shortest_wait, self._interval_began_at = wait, now_s

    def admit(self) -> bool:
        """Returns whether one more piece of work may go on: exactly the share of them, evenly spread."""
        if self.admitted_share >= 1.0:
            return True
        self._credit += self.admitted_share
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True
