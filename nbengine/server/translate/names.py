"""The names of a body's fields, where what is made of them has other names."""

from __future__ import annotations

from collections.abc import Mapping

from nbengine.sampling_params import StructuredOutputsParams
from nbengine.server.protocol.fields import SamplingFields


def field_names(fields: SamplingFields, prompt: str) -> dict[str, str]:
    """Return the fields that an error about a prompt or a parameter is to name; `prompt` is that of the prompt."""
    names = {"prompt": prompt, "prompt_token_ids": prompt}
    return names | constraint_names("response_format") if fields.structured_outputs is None else names


def constraint_names(field: str) -> dict[str, str]:
    """Return the names with which an error about a constraint names the field that it was made of."""
    return {f"structured_outputs.{kind}": field for kind in StructuredOutputsParams.__struct_fields__}


def in_turn(first: Mapping[str, str], then: Mapping[str, str]) -> dict[str, str]:
    """Return the names that come out where one mapping is applied, and then the other."""
    return {**then, **{name: then.get(own, own) for name, own in first.items()}}
