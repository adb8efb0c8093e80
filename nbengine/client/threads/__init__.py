"""The threads that sockets belong to: one of a client's own, or the event loop that all clients share."""
