"""Processes on the machines of a Ray cluster: started, watched and ended as if they were children."""
