"""The families' ways of writing calls of tools."""
