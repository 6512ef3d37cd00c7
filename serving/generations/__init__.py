"""Generations that a replica holds, the pointer that it follows, and its heartbeats.

Start at `snapshot` and `pointer_follower`.
"""
