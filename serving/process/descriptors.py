"""Open files: as many as the connections need, with some left for everything else that opens one."""

import logging
import resource

HEADROOM = 256
"""Redis' wires, the files of generations that come and go, whoever scrapes, and connections that are about to end."""

log = logging.getLogger(__name__)


def make_room(connections: int) -> int:
    """Raises the soft limit of open files as far as so many connections need it; returns how many have room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required_files = connections + HEADROOM
    if soft == resource.RLIM_INFINITY or soft >= required_files:
        return connections
    soft = _raised(
        required_files if hard == resource.RLIM_INFINITY else min(hard, required_files), soft, hard
    )
    room = min(connections, room_in(soft))
    if room < connections:
        log.warning(
            "room for %d connections instead of %d: only %d files may be open (ulimit -Hn)",
            room, connections, soft,
        )  # fmt: skip
    return room


def room_in(files: int) -> int:
    """Connections that have room among so many open files."""
    return max(files - HEADROOM, files // 2)


def _raised(new_limit: int, soft: int, hard: int) -> int:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
    except (OSError, ValueError):  # a system with a lower limit of its own
        return soft
    return new_limit
