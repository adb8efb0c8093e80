"""Steps of a decoder that are prepared as one list of native operations."""
