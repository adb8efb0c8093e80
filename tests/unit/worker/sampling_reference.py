"""A reference of one request's next token, stage by stage, one request at a time: transformers and numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nbengine.sampling_params import SamplingParams


@dataclass
class Reference:
    """A request with its tokens; `grammar` holds the tokens that a structured output allows, where there is one."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    def changed(self, logits: Tensor, grammar: set[int] | None = None) -> Tensor:
        """The logits [V] after everything that greedy requests get, too."""
        params, vocab = self.params, len(logits)
        scores = logits[None].clone()
        output = torch.tensor([self.output], dtype=torch.int64)
        for allowed in (grammar, params.allowed_token_ids):
            if allowed is not None and (forbidden := sorted(set(range(vocab)) - set(allowed))):
                scores = SuppressTokensLogitsProcessor(forbidden)(output, scores)
        if params.bad_words_token_ids:
            scores = NoBadWordsLogitsProcessor(params.bad_words_token_ids)(output, scores)
        ends = [*params.stop_token_ids, params.eos_token_id]
        if params.min_tokens and (ends := [end for end in ends if end is not None]):
            processor = MinNewTokensLengthLogitsProcessor(0, params.min_tokens, ends)
            scores = processor(output, scores)
        if params.logit_bias:
            biases = [[[token], float(bias)] for token, bias in params.logit_bias.items()]
            scores = SequenceBiasLogitsProcessor(biases)(output, scores)
        if params.repetition_penalty != 1:
            ids = torch.tensor([self.prompt + self.output])
            scores = RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, scores)
        counts = torch.from_numpy(np.bincount(self.output, minlength=vocab))
        return scores[0] - counts * params.frequency_penalty - counts.clamp(max=1) * params.presence_penalty

    def probabilities(self, changed: Tensor) -> Tensor:
        """Compute the next token's probabilities, float64 [V], from the logits that `changed` gave."""
        params = self.params
        warpers: list[LogitsProcessor] = []
        if params.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.min_p:
            warpers.append(MinPLogitsWarper(params.min_p))
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(TopPLogitsWarper(params.top_p))
        scores = changed[None].double()
        for warper in warpers:
            scores = warper(torch.zeros((1, 1), dtype=torch.int64), scores)
        return scores[0].softmax(-1)

    def accepts(self, token: int, logits: Tensor, uniform: float, grammar: set[int] | None = None) -> bool:
        """Return whether `token` is what the random number leads to, but for rounding."""
        changed = self.changed(logits, grammar)
        if self.params.is_greedy:
            return bool(changed[token] >= changed.max() - 1e-5)
        probabilities = self.probabilities(changed)
        filtered = 0 < self.params.top_k < len(logits) or self.params.top_p < 1 or self.params.min_p
        order = changed.sort(descending=True, stable=True).indices if filtered else torch.arange(len(logits))
        ends = probabilities[order].cumsum(0)
        place = int((order == token).nonzero())
        start = float(ends[place]) - float(probabilities[token])
        return probabilities[token] > 0 and start - 1e-5 <= uniform <= float(ends[place]) + 1e-5
