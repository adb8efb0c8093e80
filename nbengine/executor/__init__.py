"""The executors, through which an engine core reaches its workers."""
