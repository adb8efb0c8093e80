"""Blocks of the KV cache: who holds them, which are shared, which can be found again. Pure Python."""
