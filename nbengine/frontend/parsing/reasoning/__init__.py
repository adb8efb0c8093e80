"""The families' ways of writing reasoning."""
