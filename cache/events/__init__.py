"""Events since a generation was made: interactions and attribute changes, each with its position in the stream.

Start at `event`.
"""
