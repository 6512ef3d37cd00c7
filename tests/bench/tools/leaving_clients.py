"""Clients that post batches of strangers and known ids, each on a connection of its own, and wait for answers or leave.

Run as a program, one process for each client: `python -m tests.bench.tools.leaving_clients HOST PORT SEED SECONDS MODE
IDS`. MODE is `wait`, or `leave` for one that closes its connection 4 ms after it sent. IDS is a file of known ids. It
prints its requests, its answers with status 200, and its connections that failed.
"""

import json
import random
import socket
import sys
import time
from pathlib import Path

STRANGERS, KNOWN_COUNT = 40, 20
LEAVE_S = 0.004


def post(address: tuple[str, int], body: bytes, *, is_patient: bool) -> bool:
    """Send one batch; return whether it was answered with 200, False for a client that left."""
    head = (
        b"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: bench\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    with socket.create_connection(address, timeout=30) as connected:
        connected.sendall(head + body)
        if is_patient:
            return connected.recv(65_536)[9:12] == b"200"
        time.sleep(LEAVE_S)
    return False


def main() -> None:
    """Post until the time is over."""
    host, port, seed, seconds, mode, path = sys.argv[1:]
    draw, known_ids = random.Random(int(seed)), Path(path).read_text().split()
    ends_at = time.monotonic() + float(seconds)
    requests = answered = failed = 0
    while time.monotonic() < ends_at:
        strangers = [f"stranger-{draw.randrange(10**9)}" for _ in range(STRANGERS)]
        body = json.dumps({"entities": strangers + draw.sample(known_ids, KNOWN_COUNT)}).encode()
        try:
            answered += post((host, int(port)), body, is_patient=mode == "wait")
        except OSError:
            failed += 1
        requests += 1
    print(requests, answered, failed)


if __name__ == "__main__":
    main()
