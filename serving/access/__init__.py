"""Access: callers by named tokens; the scopes, quota and expiry of each.

Start at `callers`.
"""
