"""The clients of an engine, which also find and start its processes."""
