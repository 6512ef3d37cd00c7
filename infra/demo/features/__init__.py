"""Features of the synthetic world's users and items, a model that reads them, and requests that have nothing else.

`profiles` makes the features, `towers` adds them to the reference bundle, `cold_start` asks for those without history.
"""
