"""Clients of an engine core, and how its processes are found and started."""
