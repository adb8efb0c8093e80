"""The dashboard without a script: the same state as a part of a page, as pictures and as text."""
