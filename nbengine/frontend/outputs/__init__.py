"""The way from the engine core's outputs to what a caller reads."""
