"""A client's link to the host: it attaches, keeps a lease, finds out when the engine ends, and leaves it."""
