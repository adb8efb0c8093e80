"""The dashboard without a script: the same state as a page part, as pictures and as text."""
