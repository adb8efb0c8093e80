"""Engines beside nbengine, each behind the same protocol, for the benchmarks that compare them."""
