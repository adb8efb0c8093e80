"""The engine's own processes: host (coordinator and supervisor) and engine core."""
