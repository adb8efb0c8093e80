"""The page docs/arguments.md, made from the declarations: `python -m nbengine.config.arguments_page >
docs/arguments.md`."""

from __future__ import annotations

from dataclasses import fields

from nbengine.config.argument import argument_of, flag_of, shown_default
from nbengine.config.engine import WITHOUT_EFFECT, EngineArgs

_HEAD = """\
# Engine arguments
`LLM`, `AsyncLLM` and `EngineArgs` take these as keywords; `%engine start` and `nbengine fit` take
them as flags. Each flag that is on or off also has a form that begins with `--no-`.
`python -m nbengine.config.arguments_page` makes this page from the declarations in
`nbengine/config/engine.py`.

| argument | flags | default | meaning |
|---|---|---|---|
"""
_WITHOUT_EFFECT = """
## Without effect
These arguments change nothing; they are accepted because existing scripts and magic lines pass
them. Values that are not listed are refused.

| argument | values | why |
|---|---|---|
"""


def arguments_page() -> str:
    """Return the text of the whole page."""
    rows = []
    for declared in fields(EngineArgs):
        argument = argument_of(declared)
        flags = () if declared.name == "model" else (*argument.flags, flag_of(declared.name))
        shown = " ".join(f"`{flag}`" for flag in flags) or "`MODEL`"
        default = "" if declared.default is None else f"`{shown_default(declared.default)}`"
        rows.append(f"| `{declared.name}` | {shown} | {default} | {_cell(argument.help)} |\n")
    idle = [
        f"| `{name}` | {', '.join(f'`{value}`' for value in idle.allowed)} | {_cell(idle.why)} |\n"
        for name, idle in WITHOUT_EFFECT.items()
    ]
    return _HEAD + "".join(rows) + _WITHOUT_EFFECT + "".join(idle)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(arguments_page(), end="")
