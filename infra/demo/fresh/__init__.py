"""Fresh events in the demo: a click that changes a list at once, and that the next night takes over.

Imports the demo's judge, data and steps. Start at `click`.
"""
