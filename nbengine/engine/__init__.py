"""The processes of an engine: the host (coordinator and supervisor) and the engine cores."""
