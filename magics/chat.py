"""`%chat` and `%%chat`: conversations with the notebook's engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from nbengine.errors import NBEngineError
from nbengine.frontend.text.interpolate import interpolate
from nbengine.magics.arguments import CALLER_ERRORS, HelpRequested
from nbengine.magics.config import NBEngine
from nbengine.magics.conversations.answer import Answer, answer_in, reading_of
from nbengine.magics.conversations.arguments import ChatOptions, chat_parser, parse_chat
from nbengine.magics.conversations.conversation import CellRun, Conversation, Conversations, Exchange
from nbengine.magics.conversations.saying import Plan, Saying
from nbengine.magics.conversations.view import AnswerNotes, chat_view, conversation_bundle
from nbengine.magics.errors import without_traceback
from nbengine.magics.generation.arguments import GenerateOptions
from nbengine.magics.generation.readiness import make_ready
from nbengine.magics.generation.request import send_all
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.stream import Stream
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.generation.turn import Turn
from nbengine.magics.generation.view import Appearance
from nbengine.magics.generation.waiting import Wait
from nbengine.magics.help import documented
from nbengine.magics.kept_prompts.calls import FindPrompt
from nbengine.magics.kept_runs.recording import Occasion, Recorder
from nbengine.magics.namespace import prompt_namespace
from nbengine.magics.session import NotebookSession
from nbengine.magics.tools.carrying import ToolRounds
from nbengine.magics.tools.mcp_servers import McpServers
from nbengine.magics.tools.toolbox import Toolbox
from nbengine.widgets.live import publish_bundle
from nbengine.widgets.words import count, print_quietly


class ChatTurn(Turn):
    """A run of the magic that returns the conversation, with its new turn unless the engine failed."""

    def __init__(
        self,
        shell: InteractiveShell,
        session: NotebookSession,
        saying: Saying,
        begin: Callable[[], Stream[Any]],
        on_answer: Callable[[GenerationResult], None],
        *,
        is_cell: bool,
    ) -> None:
        """Make the turn of a message: `begin` sends it, with what its tools have returned, for another answer."""
        super().__init__(shell, session, saying.engine, is_cell=is_cell)
        self._conversation = saying.plan.conversation
        self._rounds = saying.rounds
        self._begin = begin
        self._on_answer = on_answer

    async def go_on(self, wait: Wait) -> bool:
        """Carry out the calls of the answer, and have the model go on if there were any."""
        if self.generation is None or self._rounds is None:
            return False
        if not await self._rounds.take(self.generation.result, wait):
            if self._rounds.is_exhausted:
                print_quietly("the model calls its tools again and again; --max-calls allows more calls")
            return False
        self.generation = self._begin()
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        # What tools have done stays done, whatever ended the turn.
        is_kept = (
            error is None or isinstance(error, KeyboardInterrupt) or (self._rounds and self._rounds.rounds)
        )
        if self.generation is not None and is_kept:
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
        servers: McpServers,
        recorder: Recorder,
        find_prompt: FindPrompt,
    ) -> None:
        super().__init__(shell)
        self._find_prompt = find_prompt
        self.conversations = conversations
        self._servers = servers
        self._session = session
        self._config = config
        self._submitter = Submitter(shell, config, session, recorder)

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
                line,
                cell,
                self._config,
                lambda text: interpolate(text, namespace),
                namespace,
                self._find_prompt,
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
            rounds = self._rounds(shell, options)
            system = self._config.system if plan.system is None else plan.system
            saying = Saying(engine, plan, message, options, system, rounds)
            prompt = saying.prompt()
            generate = saying.generate_options(prompt)
        except CALLER_ERRORS as error:
            raise UsageError(f"%chat: {error}") from None
        except NBEngineError as error:
            raise without_traceback(error) from error.__cause__

        def on_answer(result: GenerationResult) -> None:
            self._add(saying, cell, result)
            if options.save is not None:
                self._save(plan.conversation, options.save)

        def go_on() -> Stream[Any]:
            prompt = saying.prompt()
            return self._sent(shell, saying, prompt, saying.generate_options(prompt))

        turn = ChatTurn(shell, self._session, saying, go_on, on_answer, is_cell=is_cell)
        try:
            turn.generation = self._sent(shell, saying, prompt, generate)
        except NBEngineError as error:
            raise turn.explained(error) from error.__cause__
        if generate.out is not None:
            shell.user_ns[generate.out] = plan.conversation
        return turn

    def _rounds(self, shell: InteractiveShell, options: ChatOptions) -> ToolRounds | None:
        tools = options.tools
        if tools is None:
            return None
        toolbox = Toolbox([*tools.tools, *self._servers.tools(tools.servers)])
        return ToolRounds(shell, tools, toolbox)

    def _sent(
        self, shell: InteractiveShell, saying: Saying, prompt: Mapping[str, Any], generate: GenerateOptions
    ) -> Stream[Any]:
        """Send a prompt, and return the stream of its answer into the cell."""
        engine = saying.engine
        is_first = not (saying.rounds and saying.rounds.rounds)
        notes = AnswerNotes(saying.plan.dropped if is_first else 0, engine.client.ready.max_model_len)
        appearance = Appearance(generate.format, stream=generate.stream, footer=generate.footer)
        view = chat_view(shell, appearance, reading_of(prompt), notes)
        request = self._submitter.prepare(engine, generate, Occasion("chat"), prompt)
        make_ready([engine.client], can_wait=False)
        send_all([request], foreground=True)
        return self._submitter.stream(engine, request, generate, view)

    def _plan(self, options: ChatOptions, cell: CellRun | None) -> Plan:
        conversation = self.conversations.open(options.name)
        if options.load is not None:
            loaded = Conversation.load(options.load)
            self.conversations.put(loaded, options.name)
            conversation = loaded
        system = options.system if options.system is not None or options.reset else conversation.system
        before = None if options.append else conversation.position_of(cell)
        if before is not None:
            # An earlier run of this cell has already applied --undo or --reset.
            return Plan(conversation, before, len(conversation) - before - 1, system)
        position = len(conversation)
        if options.reset:
            position = 0
        elif options.undo is not None:
            conversation.check_undo(options.undo)
            position -= options.undo
        return Plan(conversation, position, 0, system)

    def _add(self, saying: Saying, cell: CellRun | None, result: GenerationResult) -> None:
        rounds = () if saying.rounds is None else tuple(saying.rounds.rounds)
        if not result.text and result.finish_reason == "abort" and not rounds:
            return  # without an answer there is no turn
        answer, ending = answer_in(result.text, result.reading), result.finish_reason
        if saying.rounds is not None and saying.rounds.has_taken(result):
            answer, ending = Answer(""), "tool_calls" if saying.rounds.is_exhausted else "abort"
        turn = Exchange(saying.message, answer.text, answer.reasoning, ending, cell, rounds)
        conversation = saying.plan.conversation
        conversation.add(turn, saying.plan.position)
        conversation.system = saying.plan.system
        conversation.last = result

    def _save(self, conversation: Conversation, path: str) -> None:
        try:
            conversation.save(path)
        except NBEngineError as error:
            raise UsageError(f"%chat: --save: {error}") from None
        print(f"conversation {conversation.name!r} is in {path}")
