"""Message queues between an engine core and its workers, in shared memory or over TCP."""
