"""From the options of a line to a request that runs: sampling parameters, the prompt, the view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.config import NBEngine
from nbengine.magics.generation.answers import keep_answer
from nbengine.magics.generation.arguments import GenerateOptions, sampling_params
from nbengine.magics.generation.ongoing import OngoingRequests
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.stream import Collector, Generation
from nbengine.magics.generation.view import Appearance, View, view_for
from nbengine.magics.session import AttachedEngine
from nbengine.magics.tokens.branching import BranchTree, Origin
from nbengine.sampling_params import SamplingParams


@dataclass(frozen=True)
class PreparedRequest:
    """A request that an engine can be sent."""

    engine: AttachedEngine
    prompt: Any
    params: SamplingParams
    options: GenerateOptions

    def send(self) -> Collector:
        """Send it.

        Raises:
            NBEngineError: the request is not possible, or the engine cannot be reached.
        """
        options = self.options
        return self.engine.client.submit(
            self.prompt, self.params, data_parallel_rank=options.rank, transcript=options.prompt
        )


class Submitter:
    """Sends the prompts of a notebook's magics to engines."""

    def __init__(self, shell: InteractiveShell, config: NBEngine, ongoing: OngoingRequests) -> None:
        self._shell = shell
        self._config = config
        self._ongoing = ongoing

    def submit(
        self,
        engine: AttachedEngine,
        options: GenerateOptions,
        *,
        prompt: Any = None,
        view: View | None = None,
    ) -> Generation:
        """Send a prompt; its generation is to be run.

        `prompt` is what the engine takes, and `view` what shows the answer, where the options do not say it all.

        Raises:
            UsageError: the engine cannot do what a flag asks for.
            NBEngineError: the request is not possible, or the engine cannot be reached.
        """
        client = engine.client
        prepared = self.prepare(engine, options, prompt)
        collector, params = prepared.send(), prepared.params
        shown_by = view_for(
            self._shell,
            Appearance(options.format, stream=options.stream, footer=options.footer),
            background=options.background,
            own=view,
            on_tokens=partial(self._ongoing.views.add, client.name) if params.logprobs is not None else None,
        )
        generation = Generation(
            collector,
            options.prompt,
            shown_by,
            client.abort_soon,
            self._ongoing,
            foreground=not options.background,
        )
        keep_answer(self._ongoing.answers, generation, client, collector.engine_request_id)
        self.tell(generation.result, prepared)
        return generation

    def tell(self, result: GenerationResult, prepared: PreparedRequest) -> None:
        """Let a result know what was asked, and of whom."""
        client, prompt = prepared.engine.client, prepared.prompt
        cache_salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        origin = Origin(client, prepared.params, cache_salt, self._ongoing)
        result.tree = BranchTree(result, origin)
        result.is_json = prepared.options.parse_json
        result.names_ranks = len(client.engine_ranks) > 1

    def prepare(
        self, engine: AttachedEngine, options: GenerateOptions, prompt: Any = None
    ) -> PreparedRequest:
        """What is to be sent, without sending it; `prompt` as `submit` takes it.

        Raises:
            UsageError: the engine cannot do what a flag asks for, or a sampling parameter is not allowed.
        """
        self._check_rank(engine, options)
        params = sampling_params(options, engine.client.default_sampling_params(), self._config)
        if prompt is None:
            prompt = self.prompt(engine, options)
        return PreparedRequest(engine, prompt, params, options)

    def prompt(self, engine: AttachedEngine, options: GenerateOptions) -> Any:
        """The prompt as the engine takes it: with the chat template, or as it is.

        Raises:
            UsageError: there is no chat template, and a flag needs one.
        """
        client = engine.client
        chat = client.has_chat_template if options.chat is None else options.chat
        if not chat:
            if options.system is not None:
                raise UsageError(f"--system: the model of engine {engine.name!r} has no chat template")
            return options.prompt
        if not client.has_chat_template:
            raise UsageError(f"--chat: the model of engine {engine.name!r} has no chat template")
        system = self._config.system if options.system is None else options.system
        messages = [{"role": "system", "content": system}] if system is not None else []
        return client.render_chat([*messages, {"role": "user", "content": options.prompt}])

    def _check_rank(self, engine: AttachedEngine, options: GenerateOptions) -> None:
        engine_ranks = engine.client.engine_ranks
        if options.rank is not None and options.rank not in engine_ranks:
            ranks = ", ".join(map(str, engine_ranks))
            raise UsageError(
                f"-t {options.rank}: the engine cores of engine {engine.name!r} have the ranks {ranks}"
            )
