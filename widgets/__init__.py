"""The parts of the notebook's output that are more than text."""
