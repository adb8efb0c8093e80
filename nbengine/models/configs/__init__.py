"""The properties of a model, read from its configuration."""
