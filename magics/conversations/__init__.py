"""The conversations of `%%chat` and their history."""
