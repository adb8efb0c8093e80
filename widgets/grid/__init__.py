"""Answers side by side."""
