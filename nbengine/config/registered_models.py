"""The models that a program has registered beside those that nbengine has: architectures and the classes of their
families, as plain data, because engines run in other processes."""

from __future__ import annotations

from nbengine.checks import require

_registered: dict[str, str] = {}


def register_model(architecture: str, family: str) -> None:
    """Let engines that this process starts from now on run models of `architecture` by a family of one's own.

    A family that is registered for an architecture that nbengine knows takes its place.

    Args:
        architecture: The name in `architectures` of config.json.
        family: A class as `"module:Class"`, like `nbengine.models.family.DecoderFamily`. Its module is imported
            where the model runs, and must be importable there (`PYTHONPATH`, or an installed package).

    Raises:
        InvalidArgumentError: the architecture is empty, or the family is no string `"module:Class"`.
    """
    is_name = isinstance(architecture, str) and architecture.isidentifier()
    require("architecture", architecture, is_name, "a name as in config.json, such as 'MyForCausalLM'")
    check_reference("family", family)
    _registered[architecture] = family


def registered_models() -> dict[str, str]:
    """Return the family's class of each architecture that this process has registered."""
    return dict(_registered)


def forget_model(architecture: str) -> None:
    """Undo `register_model` for engines that are started from now on; an unknown architecture is no error."""
    _registered.pop(architecture, None)


def check_reference(name: str, value: object) -> None:
    """Check that the argument `name` is a string `"module:Class"`.

    Raises:
        InvalidArgumentError: it is something else.
    """
    parts = value.split(":") if isinstance(value, str) else ()
    is_reference = len(parts) == 2 and all(
        part.isidentifier() for dotted in parts for part in dotted.split(".")
    )
    require(name, value, is_reference, 'a string "module:Class"')
