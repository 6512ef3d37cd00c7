"""Events in the service: accepted from requests and the inbox, followed in their stream, and used in answers.

Start at `attach`.
"""
