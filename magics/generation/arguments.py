"""The command lines of `%generate` and `%%generate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from IPython.core.error import UsageError

from nbengine.errors import InvalidArgumentError, did_you_mean
from nbengine.frontend.prompts.prompt import Filled
from nbengine.magics.arguments import (
    MagicParser,
    key_value,
    positive_seconds,
    unescaped,
    variable_name,
)
from nbengine.magics.comparison.axes import Several, one_or_several
from nbengine.magics.config import FORMATS, NBEngine
from nbengine.magics.generation.structured import add_constraint_flags, constraint_of
from nbengine.magics.generation.thinking import TemplateOptions, add_template_flags, template_options
from nbengine.magics.kept_prompts.calls import FindPrompt, PromptCall, no_prompt, split_call
from nbengine.magics.scores.flags import add_score_flags
from nbengine.sampling_params import RequestOutputKind, SamplingParams

Expand = Callable[[str], str]
"""A function that puts the notebook's variables into a string."""

_SAMPLING_FLAGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "thinking_budget",
    "seed",
    "n",
    "logprobs",
)
OWN_PARAMETERS = ("output_kind", "eos_token_id")
"""Parameters that nbengine sets itself."""
_DESCRIPTION = """\
Send a prompt to the engine; the answer streams into the cell.

  %%generate [flags]        the cell's body is the prompt
  %generate [flags] PROMPT  the rest of the line is the prompt
  %generate @NAME x=…       the prompt is one that %%prompt NAME has kept, with these values; @NAME:2 is version 2

{name}, {obj.attr}, {row["key"]}, {In[3]} and {Out[3]} in the prompt become the values of the notebook's
variables where they exist; other braces stay as they are, and {{name}} gives {name}.

Lists compare: --temperature 0,0.7,1, and so --top-p, --top-k, --min-p, --max-tokens, --thinking-budget, --seed,
--engine, --set KEY=[A,B], and --system given several times. --each goes through a list, dict, array or column; the
prompt and the flags name its element. All combinations run at once, into one grid, whatever their number up to
NBEngine.max_answers.

--score, --expect and --judge say how good the answers of a comparison are, one score each."""
_EPILOG = """\
The result is in _ (and in NAME with -o): .text .token_ids .finish_reason .num_cached_tokens .metrics
.logprobs (with --logprobs) .outputs (all answers, with -n; the others are the first one's)
.value (with --json: the parsed JSON) .branch(position, token) goes on from another token, .tree has all such branches
A comparison in _ : comparison[2], comparison[{"temperature": 0}], .results .settings .errors .rows() .to_frame()
.scores .summary() (the means with their intervals) .differences() (between settings, over the same prompts)
%config NBEngine.temperature = 0.7 changes a default. An interrupt keeps what has been written so far.

examples:
  %%generate -o answer --temperature 0
  %%generate --system "You answer in French." --max-tokens 100
  %%generate -o place --json '{"type": "object", "properties": {"city": {"type": "string"}}}'
  %generate --choice yes,no Is the sky blue?
  %generate --think --thinking-budget 200 --choice yes,no Is 221 a prime?
  %generate -a -o later Write a haiku about {topic}
  %%generate --temperature 0,0.7,1 -n 4
  %%generate --each questions                     {questions} is each one in turn, and so is {each}
  %%generate --each item=questions --engine A,B   {item}
  %generate @capital country=Peru --temperature 0
  %generate @capital --each country=France,Peru    --each rows takes the columns of rows for the variables
  %%generate --each df["question"] -o answers     {question}; answers.to_frame()
  %%generate --each row=df                        {row["question"]} {row.context}
  %%generate --each row=df --temperature 0,1 --score polite --expect answer --match normalised
  %generate --each word=tree,house --system "In {language}." --each language=French,Thai Translate {word}
"""


@dataclass(frozen=True)
class GenerateOptions:
    """The options of a line of `%%generate`; `chat` is None where the model decides."""

    prompt: str
    chat: bool | None
    system: str | None
    out: str | None
    background: bool
    engine: str | None
    format: str
    stream: bool
    footer: bool
    sampling: dict[str, Any]
    rank: int | None = None
    """The rank of the engine core that shall answer; None: the one with the least to do."""
    parse_json: bool = False
    """The answer is JSON, and the result's `value` is the parsed JSON."""
    template: TemplateOptions = field(default_factory=TemplateOptions)
    diff: bool = False
    """The cell shows how the answer differs from its previous one."""
    timeout: float | None = None
    """The seconds after which the answer is ended."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The messages of a conversation, the prompt as the last one of the user; none where the prompt is all."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """The tools that the model may call, as `AsyncLLM.render_chat` takes them."""
    kept: Filled | None = None
    """The kept prompt that the line names, with its values."""


@dataclass(frozen=True)
class GenerateLine:
    """A line of `%generate` or `%%generate` and the text that follows it, before its flags are read."""

    prog: str
    parser: MagicParser
    words: list[str]
    prompt: str
    call: PromptCall | None = None
    """The kept prompt that stands in the place of a text."""


class _Repeated(argparse.Action):
    """An action for a flag whose values are compared when it is given several times."""

    def __call__(
        self, _: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *__: object
    ) -> None:
        before = getattr(namespace, self.dest)
        several = before if isinstance(before, Several) else () if before is None else (before,)
        setattr(namespace, self.dest, Several((*several, value)) if several else value)


def generate_parser(expand: Expand = str, prog: str = "%%generate") -> MagicParser:
    """Make the parser of the flags; `expand` is applied to each value before it is read."""
    usage = prog.replace("%", "%%") + " [flags]" + ("" if prog.startswith("%%") else " PROMPT")
    parser = MagicParser(prog, _DESCRIPTION, _EPILOG, usage=usage)
    parser.add_argument(
        "-o", "--out", metavar="NAME", type=variable_name, help="bind the result to a variable"
    )
    _add_request_flags(parser, expand)
    parser.add_argument("-f", "--format", choices=FORMATS, metavar="F", help="text, markdown, json or code")
    add_sampling_flags(parser, expand)
    add_constraint_flags(parser)
    add_template_flags(parser, expand)
    parser.add_argument("--no-stream", action="store_true", help="show the answer when it is complete")
    parser.add_argument(
        "--diff", action="store_true", help="show what differs from this cell's previous answer"
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        metavar="S",
        help="end what has not ended after S seconds; what has been written is kept",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="of a comparison, ask only what no kept run has answered to its end; `%%runs` has those that have",
    )
    parser.add_argument(
        "--retries",
        type=int,
        metavar="N",
        default=None,
        help="ask a request of a comparison again, up to N times, that an engine core has lost (default 2)",
    )
    add_score_flags(parser)
    return parser


def _add_request_flags(parser: MagicParser, expand: Expand) -> None:
    """Add the flags that say what is asked, and of which engine."""
    add = parser.add_argument
    add("-a", "--noblock", action="store_true", help="do not wait: the result is a handle to await or ask")
    add(
        "--engine",
        metavar="NAME",
        type=one_or_several(str.strip),
        help="engine to ask (default: the last one started or attached)",
    )
    add(
        "--each",
        metavar="[NAME=]SOURCE",
        action="append",
        default=[],
        help="ask for each element of a variable, or of words with commas between them (repeatable)",
    )
    add(
        "-t",
        dest="rank",
        metavar="RANK",
        type=_number(int, expand),
        help="engine core to ask, of several (default: the one with the least to do)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--chat",
        action="store_const",
        const=True,
        dest="chat",
        help="use the chat template (default if there is one)",
    )
    mode.add_argument(
        "--raw", action="store_const", const=False, dest="chat", help="complete the prompt as it is"
    )
    add(
        "--system",
        metavar="S",
        type=expand,
        action=_Repeated,
        help="system message (repeatable: they are compared)",
    )


def add_sampling_flags(parser: MagicParser, expand: Expand) -> None:
    """Add the flags of the sampling parameters, constraints apart; those that take a list are compared."""

    def number(kind: Callable[[str], Any]) -> Callable[[str], Any]:
        return _number(kind, expand)

    def numbers(kind: Callable[[str], Any]) -> Callable[[str], Any]:
        return _number(one_or_several(kind), expand)

    add = parser.add_argument
    add("--temperature", metavar="T", type=numbers(float), help="0 is greedy; higher is more varied")
    add("--top-p", metavar="P", type=numbers(float), help="sample from the likeliest tokens of this total")
    add("--top-k", metavar="K", type=numbers(int), help="sample from the K likeliest tokens")
    add(
        "--min-p", metavar="P", type=numbers(float), help="least probability, relative to the likeliest token"
    )
    add("--max-tokens", metavar="N", type=numbers(int), help="most new tokens")
    add(
        "--thinking-budget",
        metavar="N",
        type=numbers(int),
        help="most tokens of thinking, which is then closed",
    )
    add("--seed", metavar="N", type=numbers(int), help="the same seed gives the same answer")
    add(
        "--stop",
        metavar="S",
        type=lambda text: unescaped(expand(text)),
        action="append",
        help=r"end where this text appears (repeatable; \n is a line break)",
    )
    add("-n", metavar="N", type=number(int), help="number of answers, which share the prompt's computation")
    add(
        "--logprobs",
        metavar="K",
        type=number(int),
        help="shade tokens by probability, with the K likeliest in their place: a click on one goes on from it",
    )
    add(
        "--set",
        metavar="KEY=VALUE",
        type=lambda text: key_value(expand(text)),
        action="append",
        default=[],
        help="any other sampling parameter by its Python name, the value as JSON",
    )


def _number(kind: Callable[[str], Any], expand: Expand) -> Callable[[str], Any]:
    """Make a reader that puts variables in and applies `kind`; its name is that of `kind`, for complaints."""

    def read(text: str) -> Any:
        return kind(expand(text))

    read.__name__ = kind.__name__
    return read


def read_line(
    line: str, body: str | None, expand: Expand, find_prompt: FindPrompt = no_prompt
) -> GenerateLine:
    """Split a line into words and prompt, without reading its flags; `find_prompt` finds what `@NAME` means.

    Raises:
        UsageError: the line cannot be divided, or names a kept prompt that does not exist.
    """
    prog = "%generate" if body is None else "%%generate"
    parser = generate_parser(expand, prog)
    words, prompt, call = split_call(line, body, parser, "prompt", find_prompt)
    return GenerateLine(prog, parser, words, prompt, call)


def options_of(
    line: GenerateLine,
    parsed: argparse.Namespace,
    config: NBEngine,
    expand: Expand,
    namespace: Mapping[str, object],
    filled: Filled | None = None,
) -> GenerateOptions:
    """Return the options of flags that have been read, each with one value; `filled` is the kept prompt of the line.

    Raises:
        UsageError: they do not go together, or one of them has several values.
    """
    prog = line.prog
    prompt = expand(line.prompt) if filled is None else filled.question
    if not prompt.strip():
        raise UsageError(f"{prog}: the prompt is empty")
    if parsed.system is not None and parsed.chat is False:
        raise UsageError(f"{prog}: --system needs a chat prompt, so it cannot go with --raw")
    if (template_options(parsed) or parsed.thinking_budget is not None) and parsed.chat is False:
        raise UsageError(
            f"{prog}: --think, --no-think, --template and --thinking-budget need a chat prompt, so they cannot go with "
            "--raw"
        )
    if parsed.diff and parsed.noblock:
        raise UsageError(f"{prog}: --diff needs the answer, so it cannot go with -a; .diff() shows it later")
    options = common_options(parsed, prompt, config, namespace, prog, chat=parsed.chat)
    options = replace(
        options, background=parsed.noblock, diff=parsed.diff, timeout=parsed.timeout, kept=filled
    )
    return options if filled is None else replace(options, messages=_messages(filled, parsed.system, config))


def _messages(filled: Filled, system: str | None, config: NBEngine) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a kept prompt; a system message of the line replaces its own."""
    if not filled.messages:
        return ()
    has_own = filled.messages[0]["role"] == "system"
    if system is None:
        system = None if has_own else config.system
    if system is None:
        return filled.messages
    return ({"role": "system", "content": system}, *filled.messages[has_own:])


def common_options(
    parsed: argparse.Namespace,
    prompt: str,
    config: NBEngine,
    namespace: Mapping[str, object],
    prog: str,
    *,
    chat: bool | None,
) -> GenerateOptions:
    """Return the options of the flags that all magics with a prompt have.

    Raises:
        UsageError: a flag's value is not possible, or two do not go together.
    """
    sampling = sampling_given(parsed, prog)
    constraint = constraint_of(parsed, namespace, prog)
    if constraint is not None:
        sampling["structured_outputs"] = constraint
    parse_json = parsed.json is not None
    return GenerateOptions(
        prompt=prompt,
        chat=chat,
        system=parsed.system,
        out=parsed.out,
        background=False,
        engine=parsed.engine,
        format=parsed.format or ("json" if parse_json else config.format),
        stream=not parsed.no_stream,
        footer=config.footer,
        sampling=sampling,
        rank=parsed.rank,
        parse_json=parse_json,
        template=template_options(parsed),
    )


def sampling_params(
    options: GenerateOptions, model_defaults: dict[str, Any], config: NBEngine
) -> SamplingParams:
    """Merge the sampling parameters of the model, the notebook and the line; later ones win.

    Raises:
        UsageError: a value is not allowed.
    """
    merged = {**model_defaults, **config.sampling_defaults(), **options.sampling}
    try:
        return SamplingParams(**merged, output_kind=RequestOutputKind.DELTA)
    except InvalidArgumentError as error:
        raise UsageError(f"%%generate: {error}") from None


def sampling_given(parsed: argparse.Namespace, prog: str) -> dict[str, Any]:
    """Collect the sampling parameters that a line sets with flags, `--set` included.

    Raises:
        UsageError: `--set` names no sampling parameter, or one with its own flag; a flag has several values.
    """
    for name, value in vars(parsed).items():
        if isinstance(value, Several):
            raise UsageError(f"{prog}: --{name.replace('_', '-')} takes one value here, not {len(value)}")
    given = {name: getattr(parsed, name, None) for name in (*_SAMPLING_FLAGS, "stop")}
    sampling = {name: value for name, value in given.items() if value is not None}
    known = SamplingParams.__struct_fields__
    for name, value in parsed.set:
        if name not in known:
            raise UsageError(f"{prog}: --set: no sampling parameter {name!r}{did_you_mean(name, known)}")
        if name == "structured_outputs":
            raise UsageError(f"{prog}: --set {name}: use --json, --regex or --choice")
        if name in OWN_PARAMETERS:
            raise UsageError(f"{prog}: --set {name}: nbengine sets it itself")
        sampling[name] = value
    return sampling
