"""The way from a prompt to a request, and from the engine's outputs to text."""
