"""Pods as plain processes, with the steps of a Deployment and a kubelet in their order."""

import asyncio
import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from precompute.config.settings import NightConfig
from tests.http_connection import HttpConnection
from tests.integration.balanced.balancer import Balancer
from tests.integration.ordeal import AnswerJudge
from tests.integration.program import environment, started
from tests.polling import poll_until

PRE_STOP_S = 0.8
"""Seconds between the removal of a pod and its SIGTERM; the chart has 5."""
WITHDRAWN_AFTER_S = 0.4
"""Seconds until the balancer has heard of a removal: less than the pod waits."""
CALLERS = 4
PAUSE_S = 0.05


@dataclass
class Pod:
    """A service process and its slot in the balancer."""

    process: "subprocess.Popen[str]"
    slot: int
    closing: ExitStack


@dataclass
class Deployment:
    """Pods of successive revisions; `revision` has the settings that the next pods start with."""

    night: NightConfig
    folder: Path
    balancer: Balancer
    revision: dict[str, str] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)
    started: int = 0

    def start(self) -> None:
        """Start one more pod, which becomes an endpoint once `/readyz` is 200."""
        self.started += 1
        state = self.folder / f"pod-{self.started}"
        closing = ExitStack()
        environ = environment(
            self.night, state,
            REDIS_URL=str(self.night.redis_url), LARDER_EPHEMERAL_STATE="true",
            # Other processes on this machine's cores must not count as overload of the service.
            LARDER_QUEUE_TARGET_MS="2000", LARDER_DRAIN_S="10", LARDER_SKETCH_S="0.5",
            **{"LARDER_L1_BYTES": "16384", **self.revision},
        )  # fmt: skip
        process, url = closing.enter_context(started(environ, self.folder / f"log-{self.started}"))
        assert poll_until(lambda: httpx.get(f"{url}/readyz", timeout=10).status_code == 200)
        self.pods.append(Pod(process, self.balancer.add(url), closing))

    def stop(self, pod: Pod, *, pre_stop_s: float = PRE_STOP_S) -> None:
        """End a pod as a kubelet does while the balancer still sends to it: preStop, SIGTERM, then its end."""
        self.pods.remove(pod)
        withdrawal = threading.Timer(WITHDRAWN_AFTER_S, self.balancer.remove, (pod.slot,))
        withdrawal.start()
        threading.Event().wait(pre_stop_s)
        pod.process.send_signal(signal.SIGTERM)
        code = pod.process.wait(30)
        withdrawal.join()
        self.balancer.forget(pod.slot)
        pod.closing.close()
        assert code == 0, f"the pod ended with {code}"

    def scale(self, count: int) -> None:
        """Start more pods, or stop the newest ones."""
        while len(self.pods) < count:
            self.start()
        while len(self.pods) > count:
            self.stop(self.pods[-1])

    def roll_out(self, **revision: str) -> None:
        """Replace all pods: one more at a time, never one fewer."""
        self.revision = revision
        for old in list(self.pods):
            self.start()
            self.stop(old)

    def close(self) -> None:
        """End all pods at once."""
        for pod in self.pods:
            pod.closing.close()


class Load:
    """Callers that never retry: half keep their connection, half open one for each request."""

    def __init__(self, url: str, answer_judge: AnswerJudge) -> None:
        self.answer_judge = answer_judge
        self._url = url
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def wait_for_requests(self, more: int) -> bool:
        """Return True once so many more requests have been answered or have failed."""
        goal = self.answer_judge.requests + len(self.answer_judge.wrong) + more
        return poll_until(lambda: self.answer_judge.requests + len(self.answer_judge.wrong) >= goal, 60)

    async def _run(self) -> None:
        await asyncio.gather(*(self._call(is_kept=number % 2 == 0) for number in range(CALLERS)))

    async def _call(self, *, is_kept: bool) -> None:
        async with HttpConnection(self._url, timeout_s=20) as connection:
            while not self._stop_event.is_set():
                try:
                    await self.answer_judge.send_request(connection)
                except (OSError, EOFError, asyncio.LimitOverrunError) as error:
                    self.answer_judge.wrong.append(repr(error))
                if not is_kept:
                    connection.close()
                await asyncio.sleep(self.answer_judge.rng.exponential(PAUSE_S))

    @contextlib.contextmanager
    def going_on(self) -> Iterator["Load"]:
        """Send requests until the block ends."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop_event.set()
            self._thread.join(30)
