"""One device's share of the model, and the batch it runs."""
