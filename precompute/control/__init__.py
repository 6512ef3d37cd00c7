"""The night's side of Redis' control keys: the connection, pointer, registry and replicas, and a generation's states.

Imports cache alone. Start at `states`, then `control_keys`.
"""
