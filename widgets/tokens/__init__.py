"""An answer's tokens, shaded by their probability."""
