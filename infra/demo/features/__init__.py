"""What the synthetic world knows of users and items beside their clicks, a model that reads it, and who needs that.

`profiles` makes the features, `towers` adds them to the reference bundle, `cold_start` asks for those without history.
"""
