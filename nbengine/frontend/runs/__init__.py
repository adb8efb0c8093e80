"""Runs: the prompts that people have asked with the answers that they got, kept in one SQLite file."""
