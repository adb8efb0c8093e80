"""Scores: how good the answers of a comparison are, by functions, expected values and a judge."""
