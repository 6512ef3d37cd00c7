"""Quality of answers: sampled answers computed again, drift of answers, and shares of entities that are read.

Start at `monitor`.
"""
