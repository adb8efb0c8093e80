"""The place of a worker among the others, and the ways in which workers exchange tensors."""
