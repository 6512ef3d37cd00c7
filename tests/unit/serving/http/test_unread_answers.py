"""Answers that peers do not take are bounded in bytes: slow peers are cut off first, then no large answer is begun."""

from typing import Any

import pytest

from serving.http.connections import SLOW_READER_S, UnreadAnswers

KIB = 1 << 10


class Peer:
    """Takes as much of its answers as a test says."""

    def __init__(self, unsent_bytes: int = 10 * KIB) -> None:
        self.unsent_bytes, self.is_cut = unsent_bytes, False

    def unread_bytes(self) -> int:
        return self.unsent_bytes

    def cut_off(self) -> None:
        self.is_cut = True


@pytest.fixture
def unread() -> Any:
    return UnreadAnswers(unread_bytes_max=50 * KIB)


def test_bytes_are_given_back_when_a_peer_has_taken_them(unread: Any) -> None:
    peers = [Peer() for _ in range(5)]
    for peer in peers:
        unread.add(peer, 0.0)
        unread.add(peer, 0.0)
    assert unread.held_bytes == 50 * KIB and not unread.is_full(0.0)

    for peer in peers:
        unread.remove(peer)
        unread.remove(peer)
    assert unread.held_bytes == 0


def test_peers_that_have_waited_longest_are_cut_off_until_there_is_room(unread: Any) -> None:
    peers = [Peer() for _ in range(6)]
    for number, peer in enumerate(peers):
        unread.add(peer, number * SLOW_READER_S)
    assert [peer.is_cut for peer in peers] == [True] + [False] * 5

    unread.add(Peer(25 * KIB), 6 * SLOW_READER_S)
    assert [peer.is_cut for peer in peers] == [True] * 4 + [False] * 2 and unread.cut_off_count == 4
    assert unread.held_bytes == 45 * KIB


def test_peers_that_came_just_now_are_left_and_no_more_is_begun(unread: Any) -> None:
    peers = [Peer() for _ in range(7)]
    for peer in peers:
        unread.add(peer, 0.0)
    assert unread.is_full(0.9 * SLOW_READER_S) and not any(peer.is_cut for peer in peers)

    assert not unread.is_full(SLOW_READER_S)
    assert [peer.is_cut for peer in peers] == [True] * 2 + [False] * 5


def test_what_was_taken_since_is_seen_before_anybody_is_cut_off(unread: Any) -> None:
    peers = [Peer() for _ in range(7)]
    for peer in peers:
        unread.add(peer, 0.0)
    for peer in peers:
        peer.unsent_bytes = 5 * KIB

    assert not unread.is_full(10 * SLOW_READER_S) and not any(peer.is_cut for peer in peers)
    assert unread.held_bytes == 35 * KIB
