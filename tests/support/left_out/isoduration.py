"""Jsonschema finds this in place of the library of this name, and goes on without.

The library brings another one, for dates, into each process that imports jsonschema. Nothing here has a duration to
check.
"""

raise ImportError("left out: see tests/support/left_out")
