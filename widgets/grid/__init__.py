"""Grids, which show answers side by side."""
