"""The messages between processes, and the ways that they take."""
