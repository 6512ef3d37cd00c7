"""HAProxy like a Kubernetes Service with readiness: connections go to ready pods, and nothing is retried."""

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cache.process.child_process import GuardedCommand
from infra.local.service import ROOT
from tests.polling import poll_until

# Debian installs it in a folder that is on root's PATH only.
PROGRAM = shutil.which(
    "haproxy", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
)
SLOTS = 12
# Like a Kubernetes Service, this balances connections (`mode tcp`), and a refused connection fails for the caller: it
# is not retried on another pod. Health checks are those of the readiness probe, four times as often.
SETTINGS = """
global
  stats socket {folder}/admin mode 600 level admin
  maxconn 2000
defaults
  mode tcp
  timeout connect 2s
  timeout client 60s
  timeout server 60s
  timeout check 2s
  retries 0
frontend service
  bind 127.0.0.1:{port}
  default_backend pods
backend pods
  balance leastconn
  option httpchk GET /readyz
  http-check expect status 200
  default-server check inter 500ms fall 2 rise 1
  server-template pod 1-{slots} 127.0.0.1:1 disabled
"""


class Balancer:
    """A running balancer and its endpoints, by the numbers of their slots."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._free = list(range(SLOTS, 0, -1))

    def add(self, url: str) -> int:
        """Make a ready pod an endpoint; return the number of its slot once connections go there."""
        slot, port = self._free.pop(), url.rpartition(":")[2]
        self._send_command(f"set server pods/pod{slot} addr 127.0.0.1 port {port}")
        self._send_command(f"set server pods/pod{slot} state ready")
        self._send_command(f"set server pods/pod{slot} health up")
        assert poll_until(lambda: self.status(slot) == "UP")
        return slot

    def remove(self, slot: int) -> None:
        """Send the pod no new connection; open ones stay, as with a Kubernetes Service."""
        self._send_command(f"set server pods/pod{slot} state drain")

    def forget(self, slot: int) -> None:
        """Free the slot of a pod that is gone."""
        self._send_command(f"set server pods/pod{slot} state maint")
        self._free.insert(0, slot)

    def status(self, slot: int) -> str:
        """Return UP, DOWN, DRAIN or MAINT from HAProxy's statistics."""
        lines = [line.split(",") for line in self._send_command("show stat").splitlines()]
        column = lines[0].index("status")
        (slot_status,) = [line[column] for line in lines if line[:2] == ["pods", f"pod{slot}"]]
        return slot_status.split()[0]

    def _send_command(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as admin:
            admin.settimeout(5)
            admin.connect(str(self._folder / "admin"))
            admin.sendall(command.encode() + b"\n")
            reply = b""
            while piece := admin.recv(1 << 16):
                reply += piece
        return reply.decode()


@contextmanager
def balancer(folder: Path) -> Iterator[Balancer]:
    """Run a balancer; needs `PROGRAM`."""
    assert PROGRAM is not None
    running_balancer = Balancer(folder)
    file = folder / "haproxy.cfg"
    file.write_text(SETTINGS.format(folder=folder, port=running_balancer.port, slots=SLOTS))
    with GuardedCommand([PROGRAM, "-f", file], log_path=folder / "log", cwd=ROOT) as process:
        give_up = time.monotonic() + 10
        while not (folder / "admin").exists() and process.is_running and time.monotonic() < give_up:
            time.sleep(0.01)
        assert process.is_running, process.log_tail()
        with suppress(OSError):
            running_balancer.status(1)
        yield running_balancer
