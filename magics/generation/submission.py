"""This module turns the options of a line into a request with parameters and prompt, and a stream with a view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.frontend.prompts.prompt import Filled
from nbengine.magics.config import NBEngine
from nbengine.magics.conversations.answer import reading_of
from nbengine.magics.generation.arguments import GenerateOptions, sampling_params
from nbengine.magics.generation.request import Origin, Request
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.stream import Generation
from nbengine.magics.generation.thinking import chat_prompt
from nbengine.magics.generation.view import Appearance, View, view_for
from nbengine.magics.kept_runs.recording import Occasion, Recorder
from nbengine.magics.session import AttachedEngine, NotebookSession
from nbengine.magics.tokens.branching import BranchTree
from nbengine.sampling_params import SamplingParams
from nbengine.widgets.open_views import ClosableView, OpenViews
from nbengine.widgets.stop.buttons import StopButtons


class Submitter:
    """A maker of the requests of a notebook's magics, and of the streams of their answers."""

    def __init__(
        self, shell: InteractiveShell, config: NBEngine, session: NotebookSession, recorder: Recorder
    ) -> None:
        self._shell = shell
        self._config = config
        self._session = session
        self._recorder = recorder

    def prepare(
        self, engine: AttachedEngine, options: GenerateOptions, occasion: Occasion | None, prompt: Any = None
    ) -> Request:
        """Prepare a request without sending it, and have it kept as a run when it has ended.

        `prompt` replaces the prompt that the options make. Without an `occasion` the request is none of the
        user's, and no run.

        Raises:
            UsageError: the engine cannot do what a flag asks for, or a sampling parameter is not allowed.
            NBEngineError: the chat template cannot be applied.
        """
        self.check_rank(engine, options)
        client = engine.client
        params = self.params(engine, options)
        messages = self._messages(engine, options)
        if messages is None and options.kept is not None:
            options = replace(options, prompt=as_text(options.kept, engine.name))
        if prompt is None:
            prompt = options.prompt
            if messages is not None:
                has_grammar = params.structured_outputs is not None
                prompt = chat_prompt(
                    engine, messages, options.template, has_grammar=has_grammar, **options.tools
                )
        fields = prompt if isinstance(prompt, Mapping) else {}
        origin = Origin(
            client, params, fields.get("cache_salt"), self._session.ongoing, fields.get("reasoning")
        )
        request = Request(origin, prompt, options.prompt, rank=options.rank)
        result = request.result
        result.tree = BranchTree(result, origin)
        result.is_json = options.parse_json
        result.reading = reading_of(fields)
        result.max_tokens = params.max_tokens
        result.names_ranks = len(client.engine_ranks) > 1
        request.on_end.append(partial(self._forget_dead, engine))
        if occasion is not None:
            self._recorder.follow(request, engine, options, messages, occasion)
        return request

    @property
    def views(self) -> OpenViews[ClosableView]:
        """Return the notebook's open widgets."""
        return self._session.ongoing.views

    @property
    def stops(self) -> StopButtons:
        """Return the buttons beside the answers that are being written."""
        return self._session.ongoing.stops

    def params(self, engine: AttachedEngine, options: GenerateOptions) -> SamplingParams:
        """Return the sampling parameters of a request.

        Raises:
            UsageError: one of them is not allowed.
        """
        return sampling_params(options, engine.client.default_sampling_params(), self._config)

    def question(self, engine: AttachedEngine, options: GenerateOptions, occasion: Occasion) -> str:
        """Return what runs share that have asked the same as this request would.

        Raises:
            UsageError: the engine cannot do what a flag asks for.
        """
        messages = self._messages(engine, options)
        return self._recorder.describe(
            self.params(engine, options), engine, options, messages, occasion
        ).question

    def stream(
        self,
        engine: AttachedEngine,
        request: Request,
        options: GenerateOptions,
        own: View[GenerationResult] | None = None,
    ) -> Generation:
        """Make the stream of a request that was sent; `own` replaces the view that the options choose."""
        views = self._session.ongoing.views if request.origin.params.logprobs is not None else None
        appearance = Appearance(options.format, stream=options.stream, footer=options.footer)
        view = view_for(
            self._shell,
            appearance,
            background=options.background,
            own=own,
            on_tokens=None if views is None else partial(views.open, engine.name),
        )
        return Generation(request, view, [engine.client])

    def _forget_dead(self, engine: AttachedEngine, error: NBEngineError | None) -> None:
        if isinstance(error, EngineDeadError):
            self._session.drop(engine)

    def _messages(self, engine: AttachedEngine, options: GenerateOptions) -> list[Any] | None:
        """Return the messages for the chat template; None where the prompt goes to the model as it is.

        Raises:
            UsageError: a flag needs a chat template, and there is none.
        """
        client = engine.client
        chat = client.has_chat_template if options.chat is None else options.chat
        if not chat:
            if options.system is not None:
                raise UsageError(f"--system: the model of engine {engine.name!r} has no chat template")
            if options.template:
                raise UsageError(
                    f"--think, --no-think, --template: the model of engine {engine.name!r} has no chat template"
                )
            return None
        if not client.has_chat_template:
            raise UsageError(f"--chat: the model of engine {engine.name!r} has no chat template")
        if options.messages:
            return list(options.messages)
        system = self._config.system if options.system is None else options.system
        messages = [{"role": "system", "content": system}] if system is not None else []
        return [*messages, {"role": "user", "content": options.prompt}]

    def check_rank(self, engine: AttachedEngine, options: GenerateOptions) -> None:
        engine_ranks = engine.client.engine_ranks
        if options.rank is not None and options.rank not in engine_ranks:
            ranks = ", ".join(map(str, engine_ranks))
            raise UsageError(
                f"-t {options.rank}: the engine cores of engine {engine.name!r} have the ranks {ranks}"
            )


def as_text(kept: Filled, engine: str) -> str:
    """Return a kept prompt as one text, for a model or a line without a chat template.

    Raises:
        UsageError: it has roles.
    """
    if kept.text is None:
        raise UsageError(
            f"@{kept.name}: the prompt has roles, which only a chat template can say: it cannot go with --raw, nor to an "
            f"engine whose model has none (engine {engine!r})"
        )
    return kept.text
