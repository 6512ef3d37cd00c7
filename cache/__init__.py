"""Common ground of writer and reader: stored bytes, the two tiers, and the one live path.

Rooms, lowest first: mrc, control, native, process, format, store, l2, config, model, tiers. Every room may import
`cache.errors` and `cache.formats`; beyond that imports only go down. Start at `format`, then `tiers`.
"""
