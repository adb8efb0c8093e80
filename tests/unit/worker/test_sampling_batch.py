"""Whole batches through the sampler, over arbitrary histories, against one request at a time."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from scipy.stats import chisquare

from nbengine.sampling.logits import TokenMask
from nbengine.sampling.random_streams import seeded_stream, uniforms
from nbengine.sampling.rows import rows_of
from nbengine.sampling.sampler import Sampler, SamplerOutput
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from nbengine.worker.batch.input_batch import InputBatch
from tests.support.thorough import amount
from tests.unit.worker.sampling_reference import Reference

MAX_REQS, MAX_LEN, BLOCK, VOCAB = 5, 90, 4, 77
CPU = torch.device("cpu")
SAFE = 3
"""Tokens below this are never forbidden, so that every request can get some token."""

tokens = st.integers(0, VOCAB - 1)
bannable = st.integers(SAFE, VOCAB - 1)
params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 6, 500]),
    top_p=st.sampled_from([1.0, 1.0, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    seed=st.integers(0, 2**63 - 1),
    max_tokens=st.none(),
    min_tokens=st.sampled_from([0, 0, 1, 5]),
    stop_token_ids=st.lists(bannable, max_size=2),
    eos_token_id=st.none() | bannable,
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.7]),
    bad_words_token_ids=st.none()
    | st.lists(st.lists(tokens, max_size=2).flatmap(lambda w: bannable.map(lambda b: [*w, b])), max_size=6),
    allowed_token_ids=st.none() | st.lists(tokens, max_size=12).map(lambda ids: [*ids, 0]),
    logit_bias=st.none() | st.dictionaries(tokens, st.sampled_from([-8.0, -1.0, 2.0, 9.0]), max_size=5),
    logprobs=st.none() | st.sampled_from([0, 1, 4, 20]),
)


def plan(**changes: Any) -> SchedulerOutput:
    cached = changes.get("cached", CachedRequestData())
    return SchedulerOutput(
        changes.get("new", []), cached, {}, 0, changes.get("finished", set()), changes.get("preempted", set())
    )


def sample(
    batch: InputBatch, rows: np.ndarray, logits: torch.Tensor, grammar: TokenMask | None
) -> SamplerOutput:
    """Do what the model runner does with the logits of a step."""
    sampling = batch.sampling
    metadata = sampling.metadata(rows)
    uniform = torch.from_numpy(sampling.uniforms(rows)) if metadata.random else None
    output = Sampler()(logits.clone(), metadata, uniform, sampling.constraints(rows, grammar))
    sampling.append_on_device(output.token_ids)
    batch.append(rows, output.token_ids.numpy())
    return output


class Histories(RuleBasedStateMachine):
    """Every token of a batch is what the request alone would get, whatever has happened to the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = InputBatch(MAX_REQS, MAX_LEN, BLOCK, VOCAB)
        self.known: dict[str, Reference] = {}
        self.waiting: set[str] = set()
        self.count = 0

    def running(self) -> list[str]:
        return [req_id for req_id in self.known if req_id not in self.waiting]

    @precondition(lambda self: len(self.running()) < MAX_REQS)
    @rule(prompt=st.lists(tokens, min_size=1, max_size=20), params=params_of, known=st.integers(0, 9))
    def add(self, prompt: list[int], params: SamplingParams, known: int) -> None:
        req_id, self.count = f"r{self.count}", self.count + 1
        new = NewRequestData(req_id, prompt, params, [], 0)
        self.known[req_id] = Reference(params, prompt)
        if not known:
            # A prompt of embeddings has no tokens that could be penalised.
            new.token_ids, new.prompt_embeds = [0] * len(prompt), object()
            self.known[req_id].prompt = []
        self.batch.update(plan(new=[new]))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), steps=st.integers(1, 4))
    def step(self, data: st.DataObject, steps: int) -> None:
        chosen = data.draw(st.permutations(self.running()))[: data.draw(st.integers(1, MAX_REQS))]
        masked = data.draw(st.lists(st.sampled_from(range(len(chosen))), unique=True))
        rows = np.array([self.batch.row_of[req_id] for req_id in chosen])
        for _ in range(steps):
            if max(len(self.known[r].output) for r in chosen) < 60:
                self._sample_once(chosen, rows, masked)

    def _sample_once(self, chosen: list[str], rows: np.ndarray, masked: list[int]) -> None:
        logits = torch.stack([self._logits(req_id) for req_id in chosen])
        grammars: dict[int, set[int]] = {}
        grammar = None
        if masked:
            bits = np.random.default_rng(rows[0]).integers(2, size=(len(masked), 96)).astype(np.uint8)
            bits[:, 0] = 1
            bitmask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
            grammar = TokenMask(rows_of(np.array(masked), len(chosen), CPU), bitmask)
            grammars = {p: set(np.flatnonzero(row[:VOCAB])) for p, row in zip(masked, bits, strict=True)}
            if len(masked) == len(chosen) and masked == sorted(masked):
                assert isinstance(grammar.rows, slice)
        output = sample(self.batch, rows, logits, grammar)
        self._check_logprobs(chosen, logits, output)
        for position, (req_id, token) in enumerate(zip(chosen, output.token_ids.tolist(), strict=True)):
            reference = self.known[req_id]
            stream = np.array([seeded_stream(reference.params.seed or 0)], np.uint64)
            uniform = uniforms(stream, np.array([len(reference.output)]))[0]
            assert reference.accepts(token, logits[position], uniform, grammars.get(position))
            reference.output.append(token)

    def _check_logprobs(self, chosen: list[str], logits: torch.Tensor, output: SamplerOutput) -> None:
        wanted = [(p, r) for p, r in enumerate(chosen) if self.known[r].params.logprobs is not None]
        if not wanted:
            assert output.logprobs is None
            return
        assert output.logprobs is not None
        metadata = self.batch.sampling.metadata(np.array([self.batch.row_of[r] for r in chosen])).logprobs
        assert metadata is not None
        assert metadata.positions == [position for position, _ in wanted]
        lists = output.logprobs.to_lists(metadata.counts)
        for (position, req_id), found in zip(wanted, lists, strict=True):
            top = self.known[req_id].params.logprobs or 0
            exact = logits[position].double().log_softmax(-1)
            ids = [int(output.token_ids[position]), *exact.topk(top).indices.tolist()]
            assert found.logprob_token_ids == [ids]
            np.testing.assert_allclose(found.logprobs[0], exact[ids], atol=1e-5)

    def _logits(self, req_id: str) -> torch.Tensor:
        seed = int(req_id[1:]) * 1000 + len(self.known[req_id].output)
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def preempt_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.running()), unique=True, min_size=1))
        self.waiting.update(chosen)
        self.batch.update(plan(preempted=set(chosen)))

    @precondition(lambda self: self.waiting and len(self.running()) < MAX_REQS)
    @rule(data=st.data())
    def resume_one(self, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.waiting.remove(req_id)
        self.batch.update(plan(cached=CachedRequestData([req_id], {req_id}, [[]], [0])))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def finish_some(self, data: st.DataObject) -> None:
        chosen = set(data.draw(st.lists(st.sampled_from(sorted(self.known)), min_size=1)))
        for req_id in chosen:
            del self.known[req_id]
        self.waiting -= chosen
        self.batch.update(plan(finished=chosen))
        if not self.known:
            self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        assert not self.batch.sampling._tables()
        assert not self.batch._sampled


Histories.TestCase.settings = settings(
    max_examples=amount(15, thorough=1200), stateful_step_count=20, deadline=None
)
TestHistories = Histories.TestCase

FEATURES: list[dict[str, Any]] = [
    {"allowed_token_ids": [0, 5, 11, 40]},
    {"bad_words_token_ids": [[t] for t in range(SAFE, VOCAB - 6)]},
    {"bad_words_token_ids": [[a, b] for a in range(VOCAB) for b in range(SAFE, VOCAB) if (a + b) % 5]},
    {"logit_bias": {9: 30.0, 10: 31.0}},
    {"min_tokens": 9, "stop_token_ids": list(range(SAFE, VOCAB))},
    {"repetition_penalty": 9.0, "presence_penalty": 2.0},
    {"logprobs": 3},
    {"temperature": 1.5, "top_k": 3},
]


@pytest.mark.parametrize(
    ("first", "last"),
    amount(
        # Each beside one that asks for the same, and beside another.
        [({}, FEATURES[0]), *((each, each) for each in FEATURES), *itertools.pairwise(FEATURES)],
        thorough=list(itertools.product([{}, *FEATURES], FEATURES)),
    ),
    ids=lambda features: next(iter(features), "plain"),
)
def test_a_row_that_moves_or_comes_back_keeps_what_it_asked_for(
    first: dict[str, Any], last: dict[str, Any]
) -> None:
    machine = Histories()
    for features in (first, {}, last):
        params = SamplingParams(**{"temperature": 0.0, "seed": 3, "max_tokens": None} | features)
        machine.add(prompt=[1, 2, 3], params=params, known=1)

    def sample_all() -> None:
        chosen = machine.running()
        rows = np.array([machine.batch.row_of[req_id] for req_id in chosen])
        for _ in range(4):
            machine._sample_once(chosen, rows, [])

    sample_all()
    machine.batch.update(plan(finished={"r0"}))
    del machine.known["r0"]
    assert machine.batch.row_of["r2"] == 0
    sample_all()
    machine.batch.update(plan(preempted={"r2"}))
    machine.batch.update(plan(cached=CachedRequestData(["r2"], {"r2"}, [[]], [0])))
    assert machine.batch.row_of["r2"] == 1
    sample_all()


COMBINATIONS: list[dict[str, Any]] = [
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2, "temperature": 0.8},
    {"repetition_penalty": 1.5, "temperature": 1.4, "top_p": 0.9, "logit_bias": {3: 1.5}},
    {"frequency_penalty": -0.5, "temperature": 0.7, "top_k": 12, "bad_words_token_ids": [[5], [9, 6]]},
    {"presence_penalty": 1.5, "min_p": 0.02, "allowed_token_ids": list(range(0, 40, 2))},
]


@pytest.mark.parametrize("settings_of", COMBINATIONS, ids=lambda settings: "+".join(settings))
def test_twenty_thousand_draws_follow_the_distribution_of_the_stages(settings_of: dict[str, Any]) -> None:
    requests, draws, vocab = 200, 100, 40
    reference = Reference(SamplingParams(max_tokens=None, **settings_of), [1, 2, 3, 3], [7, 7, 9])
    batch = InputBatch(requests, 8, 8, vocab)
    for index in range(requests):
        params = SamplingParams(seed=index, max_tokens=None, **settings_of)
        batch.update(plan(new=[NewRequestData(str(index), reference.prompt, params, [], 0)]))
    rows = np.arange(requests)
    for token in reference.output:
        batch.sampling.metadata(rows)
        batch.sampling.append_on_device(torch.full((requests,), token))
        batch.append(rows, np.full(requests, token))
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1))
    metadata, constraints = batch.sampling.metadata(rows), batch.sampling.constraints(rows)
    observed = np.zeros(vocab, np.int64)
    for position in range(draws):
        uniform = torch.from_numpy(uniforms(batch.sampling.rows["stream"], np.full(requests, position)))
        output = Sampler()(logits.repeat(requests, 1), metadata, uniform, constraints)
        observed += np.bincount(output.token_ids.numpy(), minlength=vocab)
    expected = reference.probabilities(reference.changed(logits)).numpy() * requests * draws
    assert not observed[expected == 0].any()
    likely = expected >= 5
    observed, expected = observed[likely], expected[likely]
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4


def test_a_plain_batch_computes_nothing_that_it_was_not_asked_for() -> None:
    batch = InputBatch(4, 16, 4, VOCAB)
    params = SamplingParams(temperature=0)
    batch.update(plan(new=[NewRequestData(name, [1, 2], params, [], 0) for name in "abc"]))
    rows = np.arange(3)
    metadata = batch.sampling.metadata(rows)
    assert not metadata.changes_logits
    assert metadata.logprobs is None
    assert batch.sampling.constraints(rows) is None
    assert not batch.sampling.needs_tokens
    assert batch.sampling._tables() == []
    batch.append(rows, np.array([1, 2, 3]))
    assert batch.sampling.metadata(rows) is metadata
