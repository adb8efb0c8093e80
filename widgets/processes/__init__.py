"""The processes of an engine: those that run, the progress of their start, and their future needs."""
