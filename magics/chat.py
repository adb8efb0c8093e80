"""`%chat` and `%%chat`: conversations with the notebook's engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from nbengine.errors import NBEngineError
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.magics.arguments import CALLER_ERRORS, HelpRequested
from nbengine.magics.config import NBEngine
from nbengine.magics.conversations.answer import answer_in, reading_of
from nbengine.magics.conversations.arguments import ChatOptions, chat_parser, parse_chat
from nbengine.magics.conversations.conversation import CellRun, Conversation, Conversations, Exchange
from nbengine.magics.conversations.view import AnswerNotes, chat_view, conversation_bundle
from nbengine.magics.errors import without_traceback
from nbengine.magics.generation.arguments import GenerateOptions
from nbengine.magics.generation.readiness import make_ready
from nbengine.magics.generation.request import send_all
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.generation.thinking import chat_prompt
from nbengine.magics.generation.turn import Turn
from nbengine.magics.generation.view import Appearance
from nbengine.magics.help import documented
from nbengine.magics.interpolate import interpolate
from nbengine.magics.namespace import prompt_namespace
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.widgets.live import publish_bundle
from nbengine.widgets.words import count


@dataclass(frozen=True)
class _Plan:
    """The place of a message: it follows `position` turns of a conversation and replaces the other ones."""

    conversation: Conversation
    position: int
    dropped: int
    """Turns behind the one that this cell had added before; they are removed with it."""
    system: str | None


class ChatTurn(Turn):
    """A run of the magic that returns the conversation, with its new turn unless the engine failed."""

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        engine: AttachedEngine | None,
        conversation: Conversation,
        on_answer: Callable[[GenerationResult], None],
        *,
        is_cell: bool,
    ) -> None:
        super().__init__(shell, session, engine, is_cell=is_cell)
        self._conversation = conversation
        self._on_answer = on_answer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        if self.generation is not None and (error is None or isinstance(error, KeyboardInterrupt)):
            self._on_answer(self.generation.result)
        super().__exit__(kind, error, traceback)

    def keep(self, value: object, *, failed: bool = False) -> None:
        """Put the conversation where the user finds it, in place of the result of its last answer."""
        del value
        super().keep(self._conversation, failed=failed)


@magics_class
class ChatMagics(Magics):
    """The magics `%chat` and `%%chat`, with the notebook's conversations."""

    shell: InteractiveShell

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        config: NBEngine,
        conversations: Conversations,
    ) -> None:
        super().__init__(shell)
        self.conversations = conversations
        self._session = session
        self._config = config
        self._submitter = Submitter(shell, config, session)

    @no_var_expand
    @line_cell_magic
    @documented(chat_parser)
    def chat(self, line: str, cell: str | None = None) -> Any:
        """Say something in a conversation; the answer streams into the cell."""
        __tracebackhide__ = True
        return self._begin(line, cell).run_blocking()

    async def stream(self, line: str, cell: str | None = None) -> Any:
        """Do what `chat` does, but awaited: a kernel's top-level cell runs this."""
        __tracebackhide__ = True
        return await self._begin(line, cell).run()

    def _begin(self, line: str, cell: str | None) -> Turn:
        __tracebackhide__ = True
        shell, namespace = self.shell, prompt_namespace(self.shell)
        try:
            options = parse_chat(
                line, cell, self._config, lambda text: interpolate(text, namespace), namespace
            )
            if options.message is None:
                self._manage(options)
                return Turn(shell, self._session, None, is_cell=cell is not None)
        except HelpRequested as request:
            print(request)
            return Turn(shell, self._session, None, is_cell=cell is not None)
        except CALLER_ERRORS as error:
            raise UsageError(f"%chat: {error}") from None
        except NBEngineError as error:
            raise without_traceback(error) from error.__cause__
        return self._say(shell, options, options.message, is_cell=cell is not None)

    def _manage(self, options: ChatOptions) -> None:
        """Carry out a line without a message: save, load, undo, reset or show a conversation."""
        if options.load is not None:
            self.conversations.put(Conversation.load(options.load), options.name)
        is_new = options.system is not None or options.load is not None
        conversation = (self.conversations.open if is_new else self.conversations.find)(options.name)
        if options.undo is not None:
            gone = conversation.undo(options.undo)
            left = count(len(conversation), "turn")
            print(f"forgot {count(len(gone), 'turn')} of conversation {conversation.name!r}; {left} left")
        if options.reset:
            gone_count = count(len(conversation), "turn")
            conversation.reset()
            print(f"conversation {conversation.name!r} is empty now; {gone_count} forgotten")
        if options.system is not None:
            conversation.system = options.system
        if options.load is not None:
            print(f"conversation {conversation.name!r} goes on after {count(len(conversation), 'turn')}")
        if options.save is not None:
            self._save(conversation, options.save)
        if options.show:
            publish_bundle(self.shell, conversation_bundle(conversation))
        if options.generate.out is not None:
            self.shell.user_ns[options.generate.out] = conversation

    def _say(self, shell: InteractiveShell, options: ChatOptions, message: str, *, is_cell: bool) -> ChatTurn:
        __tracebackhide__ = True
        engine = self._session.get(options.generate.engine)
        cell = CellRun.current(shell)
        try:
            plan = self._plan(options, cell)
            prompt = self._prompt(engine, plan, message, options.generate)
        except CALLER_ERRORS as error:
            raise UsageError(f"%chat: {error}") from None
        except NBEngineError as error:
            raise without_traceback(error) from error.__cause__
        reading, generate = reading_of(prompt), options.generate

        def on_answer(result: GenerationResult) -> None:
            self._add(plan, message, reading, cell, result)
            if options.save is not None:
                self._save(plan.conversation, options.save)

        notes = AnswerNotes(plan.dropped, engine.client.ready.max_model_len)
        appearance = Appearance(generate.format, stream=generate.stream, footer=generate.footer)
        view = chat_view(shell, appearance, reading, notes)
        turn = ChatTurn(shell, self._session, engine, plan.conversation, on_answer, is_cell=is_cell)
        try:
            request = self._submitter.prepare(engine, generate, prompt)
            make_ready([engine.client], can_wait=False)
            send_all([request], foreground=True)
        except NBEngineError as error:
            raise turn.explained(error) from error.__cause__
        turn.generation = self._submitter.stream(engine, request, generate, view)
        if generate.out is not None:
            shell.user_ns[generate.out] = plan.conversation
        return turn

    def _plan(self, options: ChatOptions, cell: CellRun | None) -> _Plan:
        conversation = self.conversations.open(options.name)
        if options.load is not None:
            loaded = Conversation.load(options.load)
            self.conversations.put(loaded, options.name)
            conversation = loaded
        system = options.system if options.system is not None or options.reset else conversation.system
        before = None if options.append else conversation.position_of(cell)
        if before is not None:
            # An earlier run of this cell has already applied --undo or --reset.
            return _Plan(conversation, before, len(conversation) - before - 1, system)
        position = len(conversation)
        if options.reset:
            position = 0
        elif options.undo is not None:
            conversation.check_undo(options.undo)
            position -= options.undo
        return _Plan(conversation, position, 0, system)

    def _prompt(self, engine: AttachedEngine, plan: _Plan, message: str, options: GenerateOptions) -> Any:
        """Render the conversation with its new message as the engine takes it.

        Raises:
            UsageError: there is no chat template, the context is too short, or the model cannot think as asked.
        """
        client = engine.client
        if not client.has_chat_template:
            raise UsageError(
                f"%chat: the model of engine {engine.name!r} has no chat template, so it cannot hold a conversation; "
                "%%generate continues a text, and `%engine load` takes another model"
            )
        prompt = self._rendered(engine, plan, plan.position, message, options)
        limit = client.ready.max_model_len - 1
        size = len(prompt.get("prompt_token_ids", ()))
        if size <= limit:
            return prompt
        for fewer in range(1, plan.position + 1):
            shorter = self._rendered(engine, plan, plan.position - fewer, message, options)
            if len(shorter["prompt_token_ids"]) <= limit:
                advice = (
                    f"`%chat --undo{f' {fewer}' if fewer > 1 else ''}` makes room, `%chat --reset` empties it"
                )
                break
        else:
            advice = (
                "shorten the message or the system message, or start the engine with a larger --max-model-len"
            )
        raise UsageError(
            f"%chat: the conversation with this message is {size:,} tokens long, and the context of engine "
            f"{engine.name!r} holds {limit + 1:,}, one of them for the answer; {advice}"
        )

    def _rendered(
        self, engine: AttachedEngine, plan: _Plan, position: int, message: str, options: GenerateOptions
    ) -> Any:
        system = self._config.system if plan.system is None else plan.system
        messages = plan.conversation.messages_before(position, system)
        messages = [*messages, {"role": "user", "content": message}]
        has_grammar = "structured_outputs" in options.sampling
        return chat_prompt(engine, messages, options.template, has_grammar=has_grammar)

    def _add(
        self,
        plan: _Plan,
        message: str,
        reading: AnswerReading,
        cell: CellRun | None,
        result: GenerationResult,
    ) -> None:
        if not result.text and result.finish_reason == "abort":
            return  # without an answer there is no turn
        answer = answer_in(result.text, reading)
        turn = Exchange(message, answer.text, answer.reasoning, result.finish_reason, cell)
        conversation = plan.conversation
        conversation.add(turn, plan.position)
        conversation.system = plan.system
        conversation.last = result

    def _save(self, conversation: Conversation, path: str) -> None:
        try:
            conversation.save(path)
        except OSError as error:
            raise UsageError(f"%chat: --save {path}: {error}") from None
        print(f"conversation {conversation.name!r} is in {path}")
