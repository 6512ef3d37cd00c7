"""Three masters of a Redis Cluster on loopback, as processes that a test may kill, restart and re-slot."""

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache.l2.slots import SLOT_COUNT
from cache.process.child_process import GuardedCommand
from cache.process.redis_server import SERVER_SETTINGS
from tests.conftest import redis_binary
from tests.polling import poll_until

MASTERS = 3
NODE_TIMEOUT_MS = 3_000


class Node:
    """One master; its port, folder and knowledge of the cluster outlive its process."""

    def __init__(self, binary: Path, folder: Path, tls: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self.port, self.bus, tls_port = _free_ports(3)
        self.open_port = tls_port if tls else self.port
        """Where its clients and the other nodes knock."""
        self.client: redis.Redis = redis.Redis(
            port=self.port, protocol=2, socket_timeout=5.0, retry=Retry(NoBackoff(), 0)
        )
        self._command = [str(binary), "--port", str(self.port), "--dir", str(folder)]
        self._command += ["--cluster-enabled", "yes", "--cluster-port", str(self.bus)]
        self._command += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
        self._command += ["--cluster-require-full-coverage", "no"]
        tls_settings = {"tls-port": str(tls_port), "tls-cluster": "yes", **tls} if tls else {}
        for name, value in {**SERVER_SETTINGS, **tls_settings}.items():
            self._command += [f"--{name}", value]
        self._log = folder / "log"
        self._process: GuardedCommand | None = None

    @property
    def address(self) -> str:
        """ "host:port"."""
        return f"127.0.0.1:{self.open_port}"

    @property
    def name(self) -> str:
        """The node's id in the cluster."""
        return str(_text(self.client.execute_command("CLUSTER MYID")))

    def start(self) -> None:
        """Start the node and wait until it answers; skip the test if the server has no cluster mode."""
        self._process = GuardedCommand(self._command, log_path=self._log)
        process = self._process
        poll_until(lambda: self._answers() or not process.is_running)
        if not self._answers() and ("cluster" in process.log_tail() or "tls" in process.log_tail()):
            pytest.skip(f"this server has no cluster mode, or no TLS: {process.log_tail(3)}")
        assert self._answers(), process.log_tail()

    def kill(self) -> None:
        """Kill the node with SIGKILL."""
        os.kill(int(self.client.info("server")["process_id"]), signal.SIGKILL)
        assert self._process is not None
        assert poll_until(lambda: not self._answers())
        self._process.stop()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within the block, the node keeps its connections and answers nothing."""
        pid = int(self.client.info("server")["process_id"])
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the node if it runs."""
        if self._process is not None:
            self._process.stop()
        self.client.close()

    def knows(self, count: int) -> bool:
        """Return whether the node says that the cluster is well and has this many nodes."""
        info = _text(self.client.execute_command("CLUSTER INFO"))
        cluster_info = info if isinstance(info, dict) else dict(
            line.split(":") for line in str(info).split()
        )  # fmt: skip
        return (cluster_info["cluster_state"], int(cluster_info["cluster_known_nodes"])) == ("ok", count)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
            return False


class TestCluster:
    """The nodes, each with a third of the slots."""

    __test__ = False

    def __init__(self, nodes: list[Node], trusted: str) -> None:
        self.nodes = nodes
        self._trusted = trusted

    @property
    def url(self) -> str:
        """The cluster's URL as a deployment would write it."""
        nodes = ",".join(node.address for node in self.nodes)
        if self._trusted:
            return f"rediss+cluster://{nodes}/0?ssl_ca_certs={self._trusted}"
        return f"redis+cluster://{nodes}"

    def of_slot(self, slot: int) -> Node:
        """Return the node that serves a slot, by the nodes' own view."""
        for first, last, (_, port, *_), *_ in self.nodes[0].client.execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody serves {slot}")

    def open_slot(self, slot: int, to: Node) -> Node:
        """Begin to move a slot without moving any key; return its owner."""
        owner = self.of_slot(slot)
        to.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", owner.name)
        owner.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", to.name)
        return owner

    def move_keys(self, slot: int, owner: Node, to: Node) -> int:
        """Move the keys of an open slot; return how many."""
        keys = owner.client.execute_command("CLUSTER GETKEYSINSLOT", slot, 10_000)
        for key in keys:
            owner.client.migrate("127.0.0.1", to.port, key, 0, 5_000)
        return len(keys)

    def close_slot(self, slot: int, to: Node) -> None:
        """Give the slot to the other node."""
        for node in (to, *self.nodes):
            node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", to.name)

    def meet(self) -> bool:
        """Introduce all nodes to the first; return whether the cluster is well (a busy machine may cut a handshake)."""
        for node in self.nodes[1:]:
            self.nodes[0].client.execute_command("CLUSTER MEET", "127.0.0.1", node.open_port, node.bus)
        return poll_until(self.well, 3.0)

    def well(self) -> bool:
        """Return whether all nodes say that the cluster is well."""
        return all(node.knows(len(self.nodes)) for node in self.nodes)


@contextmanager
def cluster(folder: Path, tls: Mapping[str, str] | None = None) -> Iterator[TestCluster]:
    """Start the cluster, wait until all nodes know all slots, stop it; `tls`: Redis' settings, also between nodes."""
    binary, tls = redis_binary(), tls or {}
    nodes = [Node(binary, folder / f"node-{number}", tls) for number in range(MASTERS)]
    try:
        for node in nodes:
            node.start()
        slots_per_master = SLOT_COUNT // MASTERS
        for number, node in enumerate(nodes):
            last = SLOT_COUNT - 1 if number == MASTERS - 1 else (number + 1) * slots_per_master - 1
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", number * slots_per_master, last)
            node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        test_cluster = TestCluster(nodes, tls.get("tls-ca-cert-file", ""))
        assert any(test_cluster.meet() for _ in range(20)), "the nodes did not find together"
        yield test_cluster
    finally:
        for node in nodes:
            node.stop()


def _text(reply: object) -> object:
    return reply.decode() if isinstance(reply, bytes) else reply


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
