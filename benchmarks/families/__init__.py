"""The models of `bench_families.py`, and the process that asks an engine of one."""
