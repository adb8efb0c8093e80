"""Time AnswerParser: an answer with reasoning, content and two calls, fed token by token.

    python benchmarks/bench_parsing.py [--json PATH]

Each family's row is an answer of some thousand tokens as the family writes it, with a tokenizer's 256 special
tokens to be left out. A token is four characters, wherever those fall. The figure is processor time a token,
the making of the parser and the end included.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from common import parser, report

from nbengine.frontend.parsing.answer_parser import AnswerReading, ParsedAnswer
from nbengine.frontend.parsing.formats import AnswerFormat

TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
TOKEN = 4
SPECIAL_TOKENS = frozenset(f"<|reserved_special_token_{number}|>" for number in range(256))
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "save",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        },
    },
}


def answers() -> dict[str, tuple[AnswerFormat, str]]:
    """Write the same answer as each family does: a third of a text is thought, a third said, a third saved."""
    text = TEXT.read_text()
    size = len(text) // 3
    thought, said, saved = text[:size], text[size : 2 * size], text[2 * size :]
    arguments = {"path": "a.md", "text": saved}
    quoted, escaped = json.dumps(arguments), json.dumps(saved)
    call = json.dumps({"name": "save", "arguments": arguments})
    think = f"<think>\n{thought}\n</think>\n\n{said}"
    separator = "<｜tool▁sep｜>"
    return {
        "plain": (AnswerFormat(), said + thought + saved),
        "hermes": (AnswerFormat("qwen3", "hermes"), f"{think}\n<tool_call>\n{call}\n</tool_call>"),
        "qwen3_coder": (
            AnswerFormat("qwen3", "qwen3_coder"),
            f"{think}<tool_call>\n<function=save>\n<parameter=text>\n{saved}\n</parameter>\n</function>\n</tool_call>",
        ),
        "llama3_json": (AnswerFormat("qwen3", "llama3_json"), call),
        "mistral": (
            AnswerFormat("mistral", "mistral"),
            f"[THINK]{thought}[/THINK]{said}[TOOL_CALLS][{call}]",
        ),
        "pythonic": (AnswerFormat("qwen3", "pythonic"), f"[save(path='a.md', text={escaped})]"),
        "deepseek": (
            AnswerFormat("deepseek_r1", "deepseek"),
            (
                f"{think}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>save{separator}{quoted}<｜tool▁call▁end｜>"
                "<｜tool▁calls▁end｜>"
            ),
        ),
        "glm": (
            AnswerFormat("glm", "glm"),
            f"{think}<tool_call>save\n<arg_key>text</arg_key>\n<arg_value>{saved}</arg_value>\n</tool_call>",
        ),
        "gpt_oss": (
            AnswerFormat("gpt_oss", "gpt_oss"),
            (
                f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary<|message|>{said}"
                f"<|end|><|start|>assistant<|channel|>commentary to=functions.save<|message|>{quoted}"
            ),
        ),
        "gemma": (
            AnswerFormat("gemma", "gemma"),
            f'<|channel>thought\n{thought}<channel|>{said}<|tool_call>call:save{{text:<|"|>{saved}<|"|>}}<tool_call|>',
        ),
        "granite": (AnswerFormat("granite", "granite"), f"{think}<|tool_call|>[{call}]"),
    }


def cost_of(family: str, chosen: AnswerFormat, text: str, rounds: int) -> float:
    """Return the median of the microseconds of processor time that a token of the answer takes."""
    reading = AnswerReading(chosen, [TOOL], special_tokens=SPECIAL_TOKENS)
    pieces = pieces_of(text)
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        own = reading.parser()
        deltas = [delta for piece in pieces for delta in own.feed(piece)] + own.finish()
        times.append((time.process_time() - begin) / len(pieces) * 1e6)
    if len(ParsedAnswer(deltas).tool_calls) != (chosen.tools is not None):
        raise SystemExit(f"the call of {family} was not found")
    return statistics.median(times)


def pieces_of(text: str) -> list[str]:
    """Cut a text into tokens."""
    return [text[place : place + TOKEN] for place in range(0, len(text), TOKEN)]


def main() -> None:
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=20)
    options = arguments.parse_args()
    rows = []
    for family, (chosen, text) in answers().items():
        median = cost_of(family, chosen, text, options.rounds)
        rows.append({"family": family, "tokens": len(pieces_of(text)), "median_us": median})
    report("parsing", rows, options.json)


if __name__ == "__main__":
    main()
