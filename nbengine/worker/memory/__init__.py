"""A worker's memory: what fits, what the KV cache gets, and what is put aside while the engine sleeps."""
