"""`%%generate`, from a cell's flags to an answer that stays in the notebook."""
