"""The way from prompts and parameters to checked requests."""
