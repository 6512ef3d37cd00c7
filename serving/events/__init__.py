"""Fresh events as they come in: read from requests and from the inbox, accepted by their Redis, counted.

Imports `cache`, requests, metrics and what lies below; the routes and the service's assembly import it. Start at
`intake`.
"""
