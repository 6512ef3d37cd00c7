"""Commands that query a running service or manage its tokens; they import no part of the service itself."""
