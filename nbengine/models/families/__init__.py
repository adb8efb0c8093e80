"""The models that can be built."""
