"""The tokens of an answer, shaded by their probability."""
