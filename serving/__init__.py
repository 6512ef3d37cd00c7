"""The service: answers from the stored tiers first, computes live when it must, and always says which.

Rooms, lowest first: arrow_ipc, answers, tracing, requests, client, admission, config, metrics, generations, rendering,
usage, replica, lookup, quality, explain, dashboard, fast_lookup, http, fast_http, process; imports only go down. The
modules here put the rooms together. Start at `lookup.ladder`; `bootstrap` shows what runs.
"""
