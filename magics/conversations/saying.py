"""A message that is being said: its place in a conversation, its tools, and the prompts of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from IPython.core.error import UsageError

from nbengine.frontend.parsing.reading import added_token_ids_of, answer_of
from nbengine.frontend.parsing.tool_grammar import tool_grammar
from nbengine.magics.conversations.arguments import ChatOptions
from nbengine.magics.conversations.conversation import Conversation, begun_turn
from nbengine.magics.generation.arguments import GenerateOptions
from nbengine.magics.generation.thinking import chat_prompt
from nbengine.magics.session import AttachedEngine
from nbengine.magics.tools.carrying import ToolRounds


@dataclass(frozen=True)
class Plan:
    """The place of a message: it follows `position` turns of a conversation and replaces the other ones."""

    conversation: Conversation
    position: int
    dropped: int
    """Turns behind the one that this cell had added before; they are removed with it."""
    system: str | None


@dataclass(frozen=True)
class Saying:
    """A message with all that its prompts are made of; `system` is the system message that goes before."""

    engine: AttachedEngine
    plan: Plan
    message: str
    options: ChatOptions
    system: str | None
    rounds: ToolRounds | None = None

    def prompt(self) -> Mapping[str, Any]:
        """Render the conversation with this message and the rounds that it has had, as the engine takes it.

        Raises:
            UsageError: there is no chat template, the context is too short, the model cannot think as asked, or
                nobody knows how it calls tools.
        """
        client = self.engine.client
        if not client.has_chat_template:
            raise UsageError(
                f"%chat: the model of engine {self.engine.name!r} has no chat template, so it cannot hold a "
                "conversation; %%generate continues a text, and `%engine load` takes another model"
            )
        prompt: Mapping[str, Any] = self._rendered(self.plan.position)
        limit = client.ready.max_model_len - 1
        size = len(prompt.get("prompt_token_ids", ()))
        if size > limit:
            raise UsageError(
                f"%chat: the conversation with this message is {size:,} tokens long, and the context of engine "
                f"{self.engine.name!r} holds {limit + 1:,}, one of them for the answer; {self._advice(limit)}"
            )
        reading = answer_of(prompt)
        if self.rounds is not None and (reading is None or reading.format.tools is None):
            raise UsageError(
                f"%chat: --tools, --mcp: the chat template of engine {self.engine.name!r} does not tell how its model calls "
                "tools; --tool-parser names the form, and `%engine load` takes another model"
            )
        return prompt

    def generate_options(self, prompt: Mapping[str, Any]) -> GenerateOptions:
        """Return the options of the next answer, with its messages; it must begin with a call if the line says so.

        Raises:
            InvalidArgumentError: the line names a tool that it does not give.
        """
        rounds = self.rounds
        messages = tuple(self._messages(self.plan.position))
        generate = replace(self.options.generate, messages=messages, tools=self._tools)
        if rounds is None or rounds.rounds or rounds.options.choice == "auto":
            return generate
        return replace(
            generate, sampling={**generate.sampling, "structured_outputs": self._grammar(rounds, prompt)}
        )

    def _grammar(self, rounds: ToolRounds, prompt: Mapping[str, Any]) -> Any:
        choice: Any = rounds.options.choice
        if choice != "required":
            choice = {"type": "function", "function": {"name": choice}}
        reading = answer_of(prompt)
        assert reading is not None
        tokens = added_token_ids_of(self.engine.client.get_tokenizer())
        return tool_grammar(
            reading.format, rounds.toolbox.schemas, choice, strict=True, added_token_ids=tokens
        )

    def _advice(self, limit: int) -> str:
        for fewer in range(1, self.plan.position + 1):
            shorter = self._rendered(self.plan.position - fewer)
            if len(shorter["prompt_token_ids"]) <= limit:
                return (
                    f"`%chat --undo{f' {fewer}' if fewer > 1 else ''}` makes room, `%chat --reset` empties it"
                )
        what = "the message or the system message" if not self._has_rounds else "what the tools return"
        return f"shorten {what}, or start the engine with a larger --max-model-len"

    @property
    def _has_rounds(self) -> bool:
        return self.rounds is not None and bool(self.rounds.rounds)

    def _rendered(self, position: int) -> Any:
        options = self.options.generate
        has_grammar = "structured_outputs" in options.sampling
        messages = self._messages(position)
        return chat_prompt(self.engine, messages, options.template, has_grammar=has_grammar, **self._tools)

    def _messages(self, position: int) -> list[dict[str, Any]]:
        messages = self.plan.conversation.messages_before(position, self.system)
        return messages + begun_turn(self.message, () if self.rounds is None else self.rounds.rounds)

    @property
    def _tools(self) -> dict[str, Any]:
        rounds = self.rounds
        if rounds is None:
            return {}
        return {"tools": rounds.toolbox.schemas, "tool_parser": rounds.options.parser}
