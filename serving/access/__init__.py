"""Access: who asks, by named tokens; what each may ask for, how much of it, and until when.

Start at `callers`.
"""
