"""Command lines of `%engine`: every engine argument is a flag of `%engine start`."""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from IPython.core.error import UsageError

from nbengine.config import EngineArgs, EngineConfig
from nbengine.config.argument import argument_of, flag_of, shown_default
from nbengine.config.engine import WITHOUT_EFFECT, argument_names, argument_types
from nbengine.errors import did_you_mean
from nbengine.magics.arguments import (
    MagicParser,
    json_object,
    key_value,
    memory_size,
    variable_name,
)
from nbengine.magics.session import AttachedEngine
from nbengine.runtime.connection import newest

_READERS: dict[str, Callable[[str], Any]] = {
    "json": json_object,
    "names": lambda text: text.split(","),
    "bytes": memory_size,
}
_DESCRIPTIONS = {
    "start": "Start an engine in its own process. It keeps running while cells come and go. One that runs with the "
    "same arguments, and that no other notebook uses, is joined instead.",
    "restart": "Stop the engine and start it again, with the same arguments except for those given here.",
    "load": "Put another model in an engine's place, under its name and with its other arguments. The model's files are "
    "found first; if it does not start, the one before is started again.",
    "fit": "Work out whether a model fits on this machine, and how: nothing is loaded, and no weights are downloaded "
    "from the hub. The flags are those of a start.",
    "chat": "Talk to a model in this terminal: to the only engine that runs, to that of --engine, or to an engine of "
    "MODEL, which ends with the talk. Further flags are those of an engine.",
    "serve": "Start an engine and a server for it, which ends the engine with it. Further flags are those of an engine.",
}
_START_IN_SHELL = (
    "Start an engine that stays when the command ends, until `nbengine stop`, or until nobody has been attached to it "
    "for a day (--keep-alive)."
)
_NEW_NAME = "name of the engine (default: made from the model's)"
_NAME_HELP = {"start": _NEW_NAME, "serve": _NEW_NAME, "chat": _NEW_NAME}
_IN_SHELL = ("nbengine start", "nbengine fit", "nbengine chat", "nbengine serve")
"""The commands of the shell, where there are no variables to bind, and no engines to join instead."""
START_EXAMPLES = """\
examples:
  %engine start                                   the small default model, on what this machine has
  %engine start random-tiny --num-blocks 64       a toy model and a tight KV cache, to watch preemption
  %engine start ./model.gguf --max-model-len 4096
  %engine start smollm2-135m --name second        beside an engine that runs already
  %engine start random-tiny --tp 2 --pp 2         the model divided among four processes
  %engine start random-tiny --dp 2                two engine cores that share the requests
"""


@dataclass(frozen=True)
class StartOptions:
    """The options of a line of `%engine start` and its like.

    `arguments` are the engine's arguments. `configured` names those that come from the notebook's
    configuration and not from the line.
    """

    name: str | None = None
    out: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    new: bool = False
    """The line asks for another engine, even where one with these arguments runs."""
    configured: frozenset[str] = frozenset()


_NO_EFFECT = "accepted, but without effect: " + ", ".join(map(flag_of, WITHOUT_EFFECT))


def start_parser(command: str = "start", prog: str = "") -> MagicParser:
    """Make the parser of `%engine start`, `restart`, `load` and `fit`, and of `nbengine start`, `chat`, `serve`
    and `fit`, from the fields of `EngineArgs`."""
    prog = prog or f"%engine {command}"
    parser = MagicParser(
        prog,
        _START_IN_SHELL if prog == "nbengine start" else _DESCRIPTIONS[command],
        _NO_EFFECT + ("\n\n" + START_EXAMPLES if command == "start" and prog not in _IN_SHELL else ""),
        usage=f"{prog.replace('%', '%%')} [MODEL] [flags]",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=argument_of(fields(EngineArgs)[0]).help)
    if command != "fit":
        parser.add_argument("--name", help=_NAME_HELP.get(command, "engine (default: the last one)"))
    if command == "start" and prog not in _IN_SHELL:
        parser.add_argument(
            "--new", action="store_true", help="start another one, also where one with these arguments runs"
        )
    bound = "report" if command == "fit" else "engine's AsyncLLM"
    if prog not in _IN_SHELL:
        parser.add_argument(
            "-o", "--out", metavar="NAME", type=variable_name, help=f"bind the {bound} to a variable"
        )
    hints = argument_types()
    for argument in fields(EngineArgs):
        if argument.name != "model":
            _add_engine_argument(parser, argument, hints[argument.name])
    for name, idle in WITHOUT_EFFECT.items():
        of_bools = isinstance(idle.allowed[0], bool)
        action = argparse.BooleanOptionalAction if of_bools else "store"
        parser.add_argument(flag_of(name), dest=name, action=action, default=None, help=argparse.SUPPRESS)
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        type=key_value,
        action="append",
        default=[],
        help="any engine argument by its Python name, the value as JSON",
    )
    return parser


def parse_start(words: Sequence[str], command: str = "start", prog: str = "") -> StartOptions:
    """Read a line of `%engine start`, `restart`, `load` or `fit`."""
    return start_options(vars(start_parser(command, prog).parse_words(words)), prog or f"%engine {command}")


def start_options(parsed: Mapping[str, Any], prog: str) -> StartOptions:
    """Make the options from what `start_parser` has parsed; `prog` begins the error of a wrong `--set`."""
    known = argument_names()
    arguments = {name: value for name, value in parsed.items() if name in known and value is not None}
    for name, value in parsed["set"]:
        if name not in known:
            raise UsageError(f"{prog}: --set: no engine argument {name!r}{did_you_mean(name, known)}")
        arguments[name] = value
    return StartOptions(parsed.get("name"), parsed.get("out"), arguments, parsed.get("new", False))


def with_model(options: StartOptions, model: str) -> StartOptions:
    """Return the options with the model of the notebook's configuration where the line names none."""
    if "model" in options.arguments:
        return options
    return replace(options, arguments={**options.arguments, "model": model}, configured=frozenset(["model"]))


def values_of(config: EngineConfig) -> dict[str, Any]:
    """Collect the engine arguments that make `config`."""
    parts: tuple[object, ...] = (config.model, config.cache, config.scheduler, config.parallel, config)
    found: dict[str, Any] = {}
    for argument in fields(EngineArgs):
        for part in parts:
            if hasattr(part, argument.name):
                found[argument.name] = getattr(part, argument.name)
                break
    found["model"] = config.model.model
    return found


def arguments_of(config: EngineConfig) -> dict[str, Any]:
    """Collect the engine arguments that make `config`, without those that have their default value."""
    defaults = values_of(EngineArgs().create_engine_config(bound=config.bound))
    return {name: value for name, value in values_of(config).items() if value != defaults[name]}


def present_arguments(engine: AttachedEngine) -> dict[str, Any]:
    """Return an engine's present arguments: another client may have changed its number of engine cores."""
    info = engine.client.connection
    found = newest(info)
    if found is info:
        # The engine has ended, and the last known number of engine cores is the one that was set here.
        return dict(engine.arguments)
    size = found.config.parallel.data_parallel_size
    known = engine.arguments.get("data_parallel_size", EngineArgs.data_parallel_size)
    return engine.arguments | ({} if size == known else {"data_parallel_size": size})


def _add_engine_argument(parser: MagicParser, argument: Field[Any], hint: Any) -> None:
    declared = argument_of(argument)
    flags = (*declared.flags, flag_of(argument.name))
    kinds = set(typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)) - {types.NoneType}
    help_text = declared.help.replace("%", "%%")
    if argument.default not in (None, "auto") and "default" not in help_text:
        help_text += f" (default: {shown_default(argument.default)})"
    if kinds == {bool}:
        parser.add_argument(
            *flags, dest=argument.name, action=argparse.BooleanOptionalAction, default=None, help=help_text
        )
        return
    plain = float if float in kinds else int if int in kinds else str
    reader = _READERS[declared.reads] if declared.reads else plain
    metavar = declared.metavar or ("N" if reader is int else "X")
    parser.add_argument(*flags, dest=argument.name, type=reader, metavar=metavar, help=help_text)
