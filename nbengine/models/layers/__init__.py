"""The building blocks of the models."""
