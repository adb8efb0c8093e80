"""Command lines of `%chat` and `%%chat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from IPython.core.error import UsageError

from nbengine.frontend.parsing.formats import TOOL_PARSERS
from nbengine.frontend.prompts.prompt import Filled
from nbengine.magics.arguments import MagicParser
from nbengine.magics.comparison.axes import Bindings
from nbengine.magics.config import NBEngine
from nbengine.magics.conversations.conversation import DEFAULT_NAME
from nbengine.magics.generation.arguments import Expand, GenerateOptions, common_options, generate_parser
from nbengine.magics.generation.structured import add_constraint_flags
from nbengine.magics.generation.thinking import add_template_flags
from nbengine.magics.kept_prompts.calls import FindPrompt, no_prompt, split_call
from nbengine.magics.tools.carrying import DEFAULT_MAX_CALLS, ToolOptions
from nbengine.magics.tools.toolbox import tools_of

_SHARED = (
    "out",
    "engine",
    "rank",
    "format",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "thinking_budget",
    "seed",
    "stop",
    "no_stream",
    "set",
    "logprobs",
)
"""Flags of `%%generate` that mean the same in a conversation, by their destinations."""
_DESCRIPTION = """\
Talk with the model: each message is answered with all of the conversation before it in mind.

  %%chat [flags]          the cell's body is the message
  %chat [flags] MESSAGE   the rest of the line is the message
  %chat @NAME x=…         the message is a prompt that %%prompt NAME has kept, with these values; its system message
                          becomes that of the conversation, as --system does
  %chat --show | --undo [N] | --reset | --save FILE | --load FILE

Running a cell again replaces what it had said, and drops what came after that; --append adds to the end instead.
An interrupted answer stays in the conversation as far as it came. A model's reasoning is folded away.
{name} in the message becomes the value of a variable, as in %%generate.

With --tools the model may call functions of the notebook: each call is shown with its result, and the model goes on
until it answers. A function says in its hints and its docstring (Args:) what it takes."""
_EPILOG = """\
The conversation is in _ (and in NAME with -o): .text .reasoning .messages .turns .to_openai() .save(FILE)
.last (the last answer's result: .token_ids .logprobs .metrics …)
It is text in this notebook: it goes on after %engine restart or load, and with another --engine.

examples:
  %%chat --system "You are a poet." --temperature 0.9
  %chat And now in French
  %chat --undo
  %chat @support name=Ann
  %%chat --name second -o other
  %%chat --tools weather,convert --confirm
  %%chat --mcp "uvx mcp-server-time" --confirm
"""


@dataclass(frozen=True)
class ChatOptions:
    """The options of a line of `%%chat`; `message` is None where the line has none for the model."""

    message: str | None
    name: str
    system: str | None
    undo: int | None
    reset: bool
    show: bool
    append: bool
    save: str | None
    load: str | None
    generate: GenerateOptions
    tools: ToolOptions | None = None


def chat_parser(expand: Expand = str, prog: str = "%%chat") -> MagicParser:
    """Make the parser of the flags; `expand` is applied to each value before it is read."""
    usage = prog.replace("%", "%%") + " [flags]" + ("" if prog.startswith("%%") else " MESSAGE")
    parser = MagicParser(prog, _DESCRIPTION, _EPILOG, usage=usage)
    add = parser.add_argument
    add(
        "--name",
        metavar="CONVERSATION",
        default=DEFAULT_NAME,
        help="name of the conversation (default: %(default)s)",
    )
    add("--system", metavar="S", type=expand, help="system message of the conversation, from now on")
    add(
        "--undo",
        metavar="N",
        nargs="?",
        type=int,
        const=1,
        help="forget the last N turns (default: 1), before the message if there is one",
    )
    add("--reset", action="store_true", help="forget the whole conversation, its system message as well")
    add("--show", action="store_true", help="show the conversation")
    add("--append", action="store_true", help="add a turn even if this cell has added one before")
    add("--save", metavar="FILE", help="write the conversation to a JSON file")
    add("--load", metavar="FILE", help="go on with a conversation from such a file")
    parser.take_flags(generate_parser(expand, prog), _SHARED)
    add_constraint_flags(parser)
    add_template_flags(parser, expand)
    _add_tool_flags(parser)
    return parser


def _add_tool_flags(parser: MagicParser) -> None:
    add = parser.add_argument
    add(
        "--tools",
        metavar="F,G",
        type=_names,
        help="functions of the notebook, or lists of them, that the model may call",
    )
    add(
        "--mcp",
        metavar="COMMAND",
        action="append",
        default=[],
        help="an MCP server whose tools the model may call, as the command that starts it (repeatable)",
    )
    add("--confirm", action="store_true", help="ask before each call")
    add(
        "--max-calls",
        metavar="N",
        type=int,
        help=f"most calls of one turn (default: {DEFAULT_MAX_CALLS})",
    )
    add(
        "--tool-choice",
        metavar="C",
        help="auto (default), required, or the name of the tool that the model must call first",
    )
    add(
        "--tool-parser",
        metavar="P",
        help="form of the calls, where the chat template does not tell it: " + ", ".join(TOOL_PARSERS),
    )


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _tool_options(parsed: Any, namespace: Mapping[str, object], prog: str) -> ToolOptions | None:
    if parsed.tools is None and not parsed.mcp:
        for flag in ("confirm", "max_calls", "tool_choice", "tool_parser"):
            if getattr(parsed, flag):
                raise UsageError(f"{prog}: --{flag.replace('_', '-')} needs --tools or --mcp")
        return None
    if any(value is not None for value in (parsed.json, parsed.regex, parsed.choice)):
        raise UsageError(
            f"{prog}: --json, --regex and --choice leave no room for calls, so they cannot go with --tools and --mcp"
        )
    max_calls = DEFAULT_MAX_CALLS if parsed.max_calls is None else parsed.max_calls
    if max_calls < 1:
        raise UsageError(f"{prog}: --max-calls must be at least 1, got {max_calls}")
    if parsed.tools is not None and not parsed.tools:
        raise UsageError(f"{prog}: --tools needs the names of functions")
    return ToolOptions(
        tuple(tools_of(parsed.tools or (), namespace)),
        tuple(parsed.mcp),
        parsed.confirm,
        max_calls,
        parsed.tool_choice or "auto",
        parsed.tool_parser or "auto",
    )


def parse_chat(
    line: str,
    body: str | None,
    config: NBEngine,
    expand: Expand,
    namespace: Mapping[str, object],
    find_prompt: FindPrompt = no_prompt,
) -> ChatOptions:
    """Read a line, and the cell's body if there is one, into options; values are checked later.

    `find_prompt` finds the kept prompt that `@NAME` means.

    Raises:
        UsageError: the line cannot be understood.
        HelpRequested: `-h` was given.
    """
    prog = "%chat" if body is None else "%%chat"
    parser = chat_parser(expand, prog)
    words, message, call = split_call(line, body, parser, "message", find_prompt)
    parsed = parser.parse_words(words)
    filled = None if call is None else call.fill(Bindings({}, namespace), {}, expand)
    if filled is None:
        message = expand(message)
    else:
        message = filled.question
        if parsed.system is None:
            parsed.system = _system_of(filled, prog)
    has_message = bool(message.strip())
    acts = parsed.undo is not None or parsed.reset or parsed.save or parsed.load or parsed.system is not None
    if not (has_message or acts or parsed.show):
        raise UsageError(f"{prog}: the message is empty ({prog} -h lists the flags)")
    if has_message and parsed.show:
        raise UsageError(f"{prog}: --show takes no message")
    if parsed.reset and parsed.undo is not None:
        raise UsageError(f"{prog}: --reset forgets all turns, so it cannot go with --undo")
    if parsed.load and (parsed.reset or parsed.undo is not None):
        raise UsageError(
            f"{prog}: --load begins with the file's turns, so it cannot go with --reset or --undo"
        )
    if not parsed.name.strip():
        raise UsageError(f"{prog}: --name needs the name of a conversation, got {parsed.name!r}")
    return ChatOptions(
        message=message if has_message else None,
        name=parsed.name,
        system=parsed.system,
        undo=parsed.undo,
        reset=parsed.reset,
        show=parsed.show,
        append=parsed.append,
        save=parsed.save,
        load=parsed.load,
        generate=replace(_generate_options(parsed, message, config, namespace, prog), kept=filled),
        tools=_tool_options(parsed, namespace, prog),
    )


def _system_of(filled: Filled, prog: str) -> str | None:
    """Return the system message of a kept prompt, None without one.

    Raises:
        UsageError: the prompt has more messages, which would be turns that nobody has had.
    """
    others = filled.messages[:-1]
    system = others[0]["content"] if others and others[0]["role"] == "system" else None
    if len(others) > (system is not None):
        raise UsageError(
            f"{prog}: @{filled.name}: a turn is one message, and the prompt has examples or other messages before its last "
            f"one: %generate @{filled.name} asks with all of them"
        )
    return system


def _generate_options(
    parsed: Any, message: str, config: NBEngine, namespace: Mapping[str, object], prog: str
) -> GenerateOptions:
    options = common_options(parsed, message, config, namespace, prog, chat=True)
    n = options.sampling.get("n", 1)
    if n != 1:
        raise UsageError(f"{prog}: --set n={n}: a conversation goes on with one answer")
    return options
