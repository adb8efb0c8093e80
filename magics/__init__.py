"""The IPython magics `%engine`, `%generate`, `%chat` and `%dashboard`."""
