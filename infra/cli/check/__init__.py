"""`larder check`: a look at what a night and the service need, each thing `ok`, `to do` with a remedy, or `not used`.

Imports precompute, serving and cache where a look runs, never before. Start at `command`.
"""
