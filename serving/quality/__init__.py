"""Quality of answers: samples scored again, drift of inputs and scores, and shares of entities that are read.

Start at `monitor`.
"""
