"""This package finds, fetches, reads and loads the files of a model."""
