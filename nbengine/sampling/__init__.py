"""The way from logits to tokens."""
