"""The tokens that an answer has cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbengine.outputs import PromptProgress


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a prompt and of its answer.

    `cached_tokens` are those of the prompt that came from the prefix cache, `reasoning_tokens` those of the
    answer that are reasoning.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def openai(self) -> dict[str, Any]:
        """Return OpenAI's usage object, as its chat and completion routes have it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def prompt_progress(progress: PromptProgress) -> dict[str, int]:
    """Return how much of a prompt has been read, in tokens and milliseconds, as llama.cpp's server has it: `cache` of
    the `processed` tokens were in the prefix cache."""
    return {
        "total": progress.num_prompt_tokens,
        "cache": progress.num_cached_tokens,
        "processed": progress.num_read_tokens,
        "time_ms": round(progress.seconds * 1000),
    }
