"""This package follows an engine through its publish socket, and makes a dashboard's state of it."""
