"""IPython magics: `%engine`, `%generate`, `%%generate`."""
