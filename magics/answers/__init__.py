"""Answers of earlier runs: those that are kept and can be found again, and what a new one differs in."""
