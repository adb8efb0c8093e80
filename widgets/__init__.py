"""What the notebook shows that is more than text."""
