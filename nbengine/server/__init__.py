"""The HTTP server: a client of an engine that other programs talk to."""
