"""Events that came after a generation's cut: interactions and attribute changes, each with its position in the stream.

Start at `event`.
"""
