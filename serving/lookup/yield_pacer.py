"""Pace of work on the event loop: others may use it now and then while a large request is worked through."""

from serving.admission.work_pacer import go_on
from serving.requests.models import RequestedEntity, RequestOptions

_TURN = 64
_HEAVY = 16


class YieldPacer:
    """Lets others use the event loop now and then while a large request is worked through."""

    def __init__(self, options: RequestOptions | None = None) -> None:
        is_heavy = options is not None and options.rerank is not None and options.rerank.is_heavy
        self._each = _HEAVY if is_heavy else 1
        self._done = 0

    async def step(self, entity: RequestedEntity) -> None:
        """Counts one more entity, a long input and an order by likeness as several."""
        self._done += self._each
        if entity.history or entity.features:
            features = (entity.features or {}).values()
            numbers = sum([len(each) if type(each) is tuple else 1 for each in features])
            self._done += (len(entity.history or ()) + numbers) // 16
        if self._done >= _TURN:
            self._done = 0
            await go_on()
