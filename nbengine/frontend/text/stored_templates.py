"""The chat templates of a tokenizer: what its files have, and what an engine was started with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbengine.config.chat_template import is_template
from nbengine.errors import InvalidArgumentError, ModelLoadError
from nbengine.models.configs.hf_config import read_json_object

Templates = str | dict[str, str] | None
"""One template, several by their names, or none."""

_OF_PROCESSORS = "chat_template.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""The names of the templates that are taken unless a call names one."""


def chosen_templates(of_tokenizer: Any, directory: Path, of_engine: str | None) -> Templates:
    """Return the templates of an engine.

    Args:
        of_tokenizer: those that transformers finds: chat_template.jinja and additional_chat_templates, else
            the entry of tokenizer_config.json, which may be a list of named ones.
        directory: the tokenizer's; chat_template.json is read there if transformers has found nothing.
        of_engine: the engine's own, which takes the place of "default" and "tool_use".

    Raises:
        ModelLoadError: chat_template.json holds something else.
    """
    found = of_tokenizer or _of_processor(directory)
    if of_engine is None:
        return found
    if isinstance(found, dict):
        return {**found, DEFAULT: of_engine, WITH_TOOLS: of_engine}
    return of_engine


def template_for(templates: Templates, asked: str | None, *, has_tools: bool) -> str:
    """Return the template of a call: the one it gives or names, else "tool_use" where there are tools, else
    "default".

    Raises:
        InvalidArgumentError: there is none, or what is asked for is neither a name nor a template.
    """
    names = ", ".join(sorted(templates)) if isinstance(templates, Mapping) else ""
    if asked is not None:
        if isinstance(templates, Mapping) and asked in templates:
            return templates[asked]
        if is_template(asked):
            return asked
        # A misspelt name would be the whole prompt.
        one = f", or one of this model's: {names}" if names else ""
        raise InvalidArgumentError("chat_template", asked, f"a template's text, which has {{{{ or {{%{one}")
    if isinstance(templates, Mapping):
        for name in (WITH_TOOLS, DEFAULT) if has_tools else (DEFAULT,):
            if name in templates:
                return templates[name]
        raise InvalidArgumentError("chat_template", None, f"given, or one of this model's: {names}")
    if templates is None:
        raise InvalidArgumentError(
            "chat_template", None, "given, because this model has none (or use generate with a plain prompt)"
        )
    return templates


def check_template(name: str, text: str) -> None:
    """Raise `InvalidArgumentError` with the line and the reason if the argument `name` is no Jinja template."""
    # This module imports jinja2.
    from nbengine.frontend.text.template_cost import parse
    from nbengine.frontend.text.template_process import reason_of

    try:
        parse(text)
    except Exception as error:
        # jinja2 may give up on what somebody else has written in any way.
        raise InvalidArgumentError(name, text, f"a Jinja template ({reason_of(error)})") from error


def _of_processor(directory: Path) -> Templates:
    path = directory / _OF_PROCESSORS
    if not path.is_file():
        return None
    found = read_json_object(path).get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    texts = list(found.items()) if isinstance(found, dict) else [("", found)]
    if not texts or not all(isinstance(name, str) and isinstance(text, str) for name, text in texts):
        raise ModelLoadError(f"{path} must have a template, or named ones, as its chat_template")
    return found
