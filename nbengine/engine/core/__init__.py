"""The engine core: requests come in, steps are scheduled and executed, outputs go out."""
