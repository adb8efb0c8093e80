"""The batch of a step: the rows of its requests, their inputs, and the outcome of sampling or pooling."""
