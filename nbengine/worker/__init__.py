"""A worker: one device's share of the model, and the batch that it runs."""
