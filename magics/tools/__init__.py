"""The tools of `%%chat --tools`: the notebook's functions, which the model calls."""
