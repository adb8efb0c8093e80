"""How an engine core reaches its workers."""
