"""The generations a replica holds, and the pointer it follows: live, previous, and the one to come.

Imports serving.config and serving.metrics. Start at `snapshot`, then `pointer_follower`.
"""
