"""The tokens of an answer and the branches that begin at them."""
