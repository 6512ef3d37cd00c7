"""Generations that a replica holds, the pointer that it follows, and its heartbeat.

Start at `snapshot` and `pointer_follower`.
"""
