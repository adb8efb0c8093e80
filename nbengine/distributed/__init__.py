"""Where a worker stands among the others, and how they exchange tensors."""
