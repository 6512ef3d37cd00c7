"""Redis under Sentinel: URLs that name the sentinels, and connections that ask them for the primary as they open.

Imports cache.errors and cache.resp. Start at `url`.
"""
