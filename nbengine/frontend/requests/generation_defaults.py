"""The sampling parameters that a model's generation_config.json recommends, and what it says beside them."""

from __future__ import annotations

import logging
from typing import Any

from nbengine.errors import ModelLoadError, NBEngineError, quoted
from nbengine.models.configs.hf_config import load_generation_config
from nbengine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_APPLIED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}
"""The entries of generation_config.json that become sampling parameters, and the names of these."""
_NOT_APPLIED: dict[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "diversity_penalty": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "top_h": (),
    "typical_p": (1,),
}
"""The entries that would change an answer and that are not applied, with the values at which they change nothing."""


class GenerationDefaults:
    """The generation_config.json of a model directory; nothing of it counts with `generation_config="none"`."""

    def __init__(self, directory: str, generation_config: str) -> None:
        """Read the file; what it asks for in vain is logged as a warning."""
        self._directory = directory
        self._stated = load_generation_config(directory) if generation_config == "auto" else {}
        if unmet := self.not_applied():
            logger.warning(
                "%s: generation_config.json says %s, which is not applied", directory, ", ".join(unmet)
            )

    def not_applied(self) -> list[str]:
        """Return the entries that change an answer and are not applied, each as "name=value"."""
        return [
            f"{name}={quoted(self._stated[name])}"
            for name, neutral in _NOT_APPLIED.items()
            if self._stated.get(name) is not None and self._stated[name] not in neutral
        ]

    def sampling_params(self) -> dict[str, Any]:
        """Return the sampling parameters that the file recommends.

        Where it says that nothing is drawn (`do_sample` is false), the temperature is 0.

        Raises:
            ModelLoadError: the file has a value that is not possible.
        """
        found = {
            name: self._stated[key] for key, name in _APPLIED.items() if self._stated.get(key) is not None
        }
        if self._stated.get("do_sample") is False:
            found["temperature"] = 0.0
        try:
            SamplingParams(**found)
        except NBEngineError as error:
            raise ModelLoadError(
                f"{self._directory} has a generation_config.json that cannot be used: {error}. Correct the file, or "
                "start the engine with generation_config='none'"
            ) from error
        return found
