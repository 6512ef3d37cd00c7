"""Access control: named tokens with their scopes, quotas and expiry.

Start at `callers`.
"""
