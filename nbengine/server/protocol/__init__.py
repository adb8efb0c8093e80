"""The bodies of requests and errors, one file an API."""
