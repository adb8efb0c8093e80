"""The button that ends an answer while it is being written."""
