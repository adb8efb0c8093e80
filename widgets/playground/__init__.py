"""The playground in the browser: an editor, variables, settings of two sides, and their answers."""
