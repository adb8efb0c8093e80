"""The blocks of the KV cache: their holders, sharing, and the index that finds them. Pure Python."""
