"""Defaults of the magics, which `%config NBEngine` shows and changes."""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from traitlets import Bool, Enum, Float, Int, List, TraitError, Unicode, validate
from traitlets.config import Configurable

from nbengine.errors import InvalidArgumentError
from nbengine.sampling_params import SamplingParams

FORMATS = ("text", "markdown", "json", "code")
DASHBOARD_FORMS = ("auto", "widget", "plain", "text")
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")


class NBEngine(Configurable):
    """The defaults of `%engine start` and `%%generate` for what a line does not say."""

    def __init__(self, **kwargs: Any) -> None:
        try:
            super().__init__(**kwargs)
        except TraitError as error:
            raise UsageError(f"the configuration of NBEngine is wrong: {error}") from None

    model = Unicode("smollm2-135m", help="Model that `%engine start` starts.").tag(config=True)
    temperature = Float(
        None, allow_none=True, help="Sampling temperature; 0 is greedy. None: what the model asks for."
    ).tag(config=True)
    top_p = Float(None, allow_none=True, help="Nucleus sampling. None: what the model asks for.").tag(
        config=True
    )
    top_k = Int(None, allow_none=True, help="Top-k sampling. None: what the model asks for.").tag(config=True)
    min_p = Float(None, allow_none=True, help="Min-p sampling. None: what the model asks for.").tag(
        config=True
    )
    max_tokens = Int(512, allow_none=True, help="Most new tokens. None: up to the context length.").tag(
        config=True
    )
    seed = Int(None, allow_none=True, help="Seed of each request. None: a different answer each time.").tag(
        config=True
    )
    system = Unicode(None, allow_none=True, help="System message of chat prompts.").tag(config=True)
    format = Enum(FORMATS, "text", help="How answers are shown: text, markdown, json or code.").tag(
        config=True
    )
    max_answers = Int(10_000, min=1, help="Most answers that one comparison may ask for.").tag(config=True)
    dashboard = Enum(
        DASHBOARD_FORMS,
        "auto",
        help="What `%dashboard` shows: a widget with its own script, a plain one of core ipywidgets, or text. "
        "auto: the widget, and the plain one if its script cannot be loaded.",
    ).tag(config=True)
    model_dirs = List(
        Unicode(), help="Directories in which `%engine models` looks for models, besides the caches."
    ).tag(config=True)
    spare_engine = Bool(
        True,
        help="`%load_ext nbengine` starts processes that import torch, for the first `%engine start` within ten "
        "minutes; they take 200 MB until then.",
    ).tag(config=True)
    footer = Bool(True, help="Show tokens, speed and reuse under each answer.").tag(config=True)

    keep_runs = Bool(
        True, help="Keep what is asked and answered, for `%runs`. False: nothing is written from then on."
    ).tag(config=True)
    runs_max_days = Int(
        365, min=1, allow_none=True, help="Days after which runs go that are not pinned. None: never."
    ).tag(config=True)
    runs_max_mb = Int(
        500, min=1, help="Megabytes that all runs may take; beyond them the oldest go that are not pinned."
    ).tag(config=True)

    @validate(*SAMPLING_DEFAULTS)
    def _check_sampling(self, proposal: Any) -> Any:
        name, value = proposal["trait"].name, proposal["value"]
        if value is not None:
            try:
                SamplingParams(**{name: value})
            except InvalidArgumentError as error:
                raise TraitError(f"NBEngine.{error}") from None
        return value

    @validate("model")
    def _check_model(self, proposal: Any) -> Any:
        if not proposal["value"]:
            raise TraitError("NBEngine.model must be the name of a model, got ''")
        return proposal["value"]

    def sampling_defaults(self) -> dict[str, Any]:
        """Collect the sampling parameters that are set here; `max_tokens` is always among them."""
        values = {name: getattr(self, name) for name in SAMPLING_DEFAULTS}
        return {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
