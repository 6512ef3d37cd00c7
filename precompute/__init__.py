"""The night: score every known entity, check the result, load it and publish it as one generation.

Rooms, lowest first: config, control, sources, bulk, bundles, erasures, releases, partitions, topk, device, builds,
scoring, erasing, gates, steps, operations, canary, planning, cli; imports only go down. Start at `steps`.
"""
