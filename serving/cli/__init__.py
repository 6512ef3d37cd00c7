"""Commands that ask a running service, or keep its tokens; they need nothing of the service itself."""
