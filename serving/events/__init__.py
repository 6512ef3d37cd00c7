"""Fresh events as they come in: read from requests and from the inbox, accepted by their Redis, counted.

Imports `cache`, requests, replica and what lies below; the routes, the dashboard and the service's assembly import it.
Start at `intake`.
"""
