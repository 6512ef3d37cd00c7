"""The generations that a replica holds, the pointer that it follows, and the heartbeats by which it tells so.

Start at `snapshot` and `pointer_follower`.
"""
