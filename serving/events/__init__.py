"""Events by day: taken in from requests and the inbox, followed in their stream, and counted by answers.

Start at `attach`.
"""
