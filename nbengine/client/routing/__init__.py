"""A client's connections to the engine cores, and its choice of the core that gets a request."""
