"""Whatever a person may pass by mistake, and the form that an error about it must have."""

from __future__ import annotations

from hypothesis import strategies as st

LONGEST = 1000
"""Characters that a message may have, whatever it is about."""
SURROGATE = "a\ud800b"
LARGE = 10**400
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from([SURROGATE, LARGE]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=5,
)


def short_line(error: Exception) -> str:
    """The message of an error, which is one short line."""
    message = str(error)
    assert len(message) <= LONGEST
    assert message.isprintable(), message
    return message
