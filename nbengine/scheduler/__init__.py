"""The scheduler: a state machine without I/O, torch or sockets."""
