"""Counters and gauges that the engine publishes."""
