"""The processes of an engine: those that run, how far their start has come, what they would take."""
