"""Fresh events: what users did since a generation was made, and where each event stands in the stream of all.

Start at `event`.
"""
