"""Comparisons: many settings or prompts at once, side by side."""
