"""A slow scheduler to compare with: plain lists, nothing incremental."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.pause import PauseState
from tests.unit.scheduler.reference_pool import ReferencePool


@dataclass(frozen=True)
class Limits:
    """The configuration of one history."""

    block_size: int = 2
    num_blocks: int = 8
    max_model_len: int = 16
    max_num_seqs: int = 4
    budget: int = 8
    chunked: bool = True
    threshold: int = 0
    policy: str = "fcfs"
    caching: bool = True
    lookahead: int = 0
    depth: int = 1
    """Steps that may be in flight."""
    ahead: bool = False
    """Whether requests are scheduled while what was sampled for them is in flight."""
    stages: int = 1
    """Of a pipeline, among whose steps requests are shared out."""


@dataclass
class ReferenceRequest:
    """A request, its tokens and its blocks."""

    req_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    order: tuple[int, float, int]
    client: int = 0
    salt: str | None = None
    computed: int = 0
    table: list[int] = field(default_factory=list)
    offered: int = 0
    """Blocks that have been put into the cache."""
    awaited: list[int] = field(default_factory=list)
    """Steps in flight that sample for it."""
    drafts: list[int] = field(default_factory=list)
    due_at: int = -1
    """The last step that sampled for it."""
    was_preempted: bool = False
    resumable_after: int = -1
    """The step that must have been answered first."""
    cached_at_first: int | None = None
    grammar_length: int | None = None


@dataclass
class ReferencePlan:
    """What one step must look like."""

    scheduled: list[tuple[str, int]] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    resumed: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)
    drafts: dict[str, list[int]] = field(default_factory=dict)


class ReferenceScheduler:
    """The policy written down as directly as possible."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = ReferencePool(limits.num_blocks)
        self.waiting: list[ReferenceRequest] = []
        self.running: list[ReferenceRequest] = []
        self.finished: set[str] = set()
        self.preempted: set[str] = set()
        self.pause = PauseState.UNPAUSED
        self.steps = 0
        self.answered = -1
        self.queries = 0
        self.hits = 0
        self.preemptions = 0
        self.added = 0

    def blocks_for(self, num_tokens: int) -> int:
        count = 0
        while count * self.limits.block_size < num_tokens:
            count += 1
        return count

    def total_limit(self, num_prompt: int, params: SamplingParams) -> int:
        if params.max_tokens is None:
            return self.limits.max_model_len
        return min(self.limits.max_model_len, num_prompt + params.max_tokens)

    def refuses(self, prompt: list[int], params: SamplingParams) -> bool:
        """Whether the request could not be run to its end even alone."""
        limits = self.limits
        if not 1 <= len(prompt) < limits.max_model_len:
            return True
        if not limits.chunked and len(prompt) > limits.budget:
            return True
        # The last token of all is sampled, never computed.
        slots = min(self.total_limit(len(prompt), params) - 1 + limits.lookahead, limits.max_model_len)
        return self.blocks_for(slots) > limits.num_blocks

    def add(
        self,
        req_id: str,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        arrival: float,
        client: int,
        salt: str | None,
        grammar_length: int | None,
    ) -> ReferenceRequest:
        order = (priority, arrival, self.added) if self.limits.policy == "priority" else (0, 0.0, self.added)
        self.added += 1
        request = ReferenceRequest(req_id, list(prompt), len(prompt), params, order, client, salt)
        request.grammar_length = grammar_length
        self.waiting.append(request)
        return request

    def find(self, req_id: str) -> ReferenceRequest | None:
        return next((r for r in self.waiting + self.running if r.req_id == req_id), None)

    def finish(self, req_id: str) -> None:
        request = self.find(req_id)
        if request is None:
            return
        self.release_blocks(request)
        (self.running if request in self.running else self.waiting).remove(request)
        self.finished.add(req_id)
        self.preempted.discard(req_id)

    def release_blocks(self, request: ReferenceRequest) -> None:
        while request.table:
            self.pool.free_one(request.table.pop())
        request.offered = 0

    def prefix(self, request: ReferenceRequest, index: int) -> object:
        return (request.salt, tuple(request.tokens[: (index + 1) * self.limits.block_size]))

    def lookup(self, request: ReferenceRequest) -> list[int]:
        if not self.limits.caching or request.params.prompt_logprobs is not None:
            return []
        found: list[int] = []
        while (len(found) + 1) * self.limits.block_size < len(request.tokens):
            wanted = self.prefix(request, len(found))
            if wanted not in self.pool.contents:
                break
            found.append(self.pool.contents.index(wanted))
        return found

    def offer(self, request: ReferenceRequest) -> None:
        """Put the full blocks of known, computed tokens into the cache, once each."""
        pool, size = self.pool, self.limits.block_size
        if not self.limits.caching:
            return
        while (request.offered + 1) * size <= min(request.computed, len(request.tokens)):
            content = self.prefix(request, request.offered)
            if content in pool.contents:
                duplicate = pool.contents.index(content)
                pool.contents[duplicate] = None
                if pool.holders[duplicate] == 0:
                    pool.least_recent_first.remove(duplicate)
                    pool.blank.append(duplicate)
            pool.contents[request.table[request.offered]] = content
            request.offered += 1

    def slots_after(self, request: ReferenceRequest, computed: int, count: int) -> int:
        return min(computed + count + self.limits.lookahead, self.limits.max_model_len)

    def chunk(self, count: int, budget: int) -> int:
        if self.limits.chunked and self.limits.threshold:
            count = min(count, self.limits.threshold)
        return min(count, budget)

    def wanted(self, request: ReferenceRequest) -> int:
        """How many tokens a running request would compute next: known ones, drafts, or one in flight."""
        known, limit = len(request.tokens), self.total_limit(request.num_prompt, request.params)
        if request.computed < known:
            return known - request.computed + min(len(request.drafts), limit - known - 1)
        ahead = self.limits.ahead and self.limits.lookahead == 0 and self.limits.stages == 1
        return 1 if ahead and known + len(request.awaited) < limit else 0

    def schedule(self) -> ReferencePlan:
        plan = ReferencePlan(finished=self.finished, preempted=self.preempted)
        self.finished, self.preempted = set(), set()
        if self.pause is not PauseState.PAUSED_ALL:
            preemptions = self.preemptions
            budget = self.continue_running(plan)
            if self.preemptions == preemptions:
                self.admit(plan, budget)
            while not plan.scheduled and self.preemptions > preemptions:
                # Those whose turn it was are gone: it is the others' turn.
                preemptions = self.preemptions
                self.continue_running(plan)
        self.steps += 1
        return plan

    def continue_running(self, plan: ReferencePlan) -> int:
        budget = self.limits.budget
        self.running.sort(key=lambda r: r.order)
        for request in self.in_turn():
            wanted = self.wanted(request)
            if budget == 0 or wanted == 0 or request not in self.running:
                continue
            count = self.chunk(wanted, budget)
            if self.make_room(request, count, plan.preempted):
                self.note(plan, request, count)
                budget -= count
        return budget

    def share(self, num_requests: int, num_free: int) -> int:
        """How many requests a step may sample for. Of all requests one part in as many as there are stages; of those
        that are in no step one part in as many as there are steps to come. Rounded up, the smaller of the two."""
        to_come = self.limits.stages - (self.steps - 1 - self.answered)
        count = 0
        while count * self.limits.stages < num_requests and count * max(to_come, 1) < num_free:
            count += 1
        return count

    def due(self) -> list[ReferenceRequest]:
        """Running requests that would be sampled for, those first that have waited for the longest time."""
        limits = self.limits
        longest = min(limits.budget, limits.threshold or limits.budget) if limits.chunked else limits.budget
        due = [r for r in self.running if 1 <= len(r.tokens) - r.computed <= longest]
        return sorted(due, key=lambda r: (r.due_at, r.order))

    def in_turn(self) -> list[ReferenceRequest]:
        """The running requests without those that have to leave this step to others."""
        due = self.due()
        left_out = due[self.share(len(self.running), len(due)) :]
        return [r for r in self.running if self.limits.stages == 1 or r not in left_out]

    def most_due(self, plan: ReferencePlan) -> int:
        """How many requests the step may sample for when waiting ones have joined."""
        if self.limits.stages == 1:
            return self.limits.max_num_seqs
        free, fitting = self.pool.num_free(), 0
        for request in self.candidates()[: self.limits.max_num_seqs - len(self.running)]:
            free -= self.blocks_for(len(request.tokens))
            if free < 0:
                break
            fitting += 1
        planned = self.num_due(plan)
        share = self.share(len(self.running) + fitting, planned + len(self.due()) + fitting)
        return max(share, planned + 1)

    @staticmethod
    def num_due(plan: ReferencePlan) -> int:
        return len([req_id for req_id, _ in plan.scheduled if req_id not in plan.incomplete])

    def make_room(self, request: ReferenceRequest, count: int, preempted: set[str]) -> bool:
        wanted = self.blocks_for(self.slots_after(request, request.computed, count))
        while wanted - len(request.table) > self.pool.num_free():
            victim = max(self.running, key=lambda r: r.order)
            self.preempt(victim, preempted)
            if victim is request:
                return False
        while len(request.table) < wanted:
            request.table.append(self.pool.take_one())
        return True

    def preempt(self, victim: ReferenceRequest, preempted: set[str]) -> None:
        self.running.remove(victim)
        self.waiting.append(victim)
        self.release_blocks(victim)
        victim.computed = 0
        victim.drafts = []
        victim.was_preempted = True
        victim.resumable_after = self.steps - 1
        preempted.add(victim.req_id)
        self.preemptions += 1

    def preempt_all(self) -> None:
        for victim in sorted(self.running, key=lambda r: r.order, reverse=True):
            self.preempt(victim, self.preempted)

    def candidates(self) -> list[ReferenceRequest]:
        """Waiting requests in order, as far as nobody blocks those behind."""
        found = []
        for request in sorted(self.waiting, key=lambda r: r.order):
            if request.was_preempted and self.answered < request.resumable_after:
                break
            if request.was_preempted or self.pause is PauseState.UNPAUSED:
                found.append(request)
        return found

    def admit(self, plan: ReferencePlan, budget: int) -> None:
        limits, most_due = self.limits, self.most_due(plan)
        for request in self.candidates():
            if budget == 0 or len(self.running) == limits.max_num_seqs or self.num_due(plan) >= most_due:
                break
            found = self.lookup(request)
            computed = len(found) * limits.block_size
            rest = len(request.tokens) - computed
            if not limits.chunked and budget < rest <= limits.budget:
                break
            count = self.chunk(rest, budget)
            planned = self.blocks_for(self.slots_after(request, computed, count))
            must_fit = max(planned, self.blocks_for(len(request.tokens)))
            free_besides_found = self.pool.num_free() - sum(1 for b in found if self.pool.holders[b] == 0)
            if must_fit - len(found) > free_besides_found:
                break
            for block in found:
                self.pool.share_one(block)
                request.table.append(block)
            while len(request.table) < planned:
                request.table.append(self.pool.take_one())
            self.waiting.remove(request)
            self.running.append(request)
            request.computed = computed
            request.offered = len(found)
            if request.was_preempted:
                plan.resumed.add(request.req_id)
            else:
                plan.new.append(request.req_id)
                request.cached_at_first = computed
                if limits.caching and request.params.prompt_logprobs is None:
                    self.queries += request.num_prompt
                    self.hits += computed
            self.note(plan, request, count)
            budget -= count

    def note(self, plan: ReferencePlan, request: ReferenceRequest, count: int) -> None:
        plan.scheduled.append((request.req_id, count))
        plan.starts[request.req_id] = request.computed
        request.computed += count
        if request.computed < len(request.tokens):
            plan.incomplete.add(request.req_id)
        else:
            num_drafts = request.computed - len(request.tokens)
            if request.drafts and num_drafts:
                plan.drafts[request.req_id] = request.drafts[:num_drafts]
            request.awaited.append(self.steps)
            request.due_at = self.steps
        request.drafts = []
        self.offer(request)

    def answer(
        self, request: ReferenceRequest, step: int, tokens: list[int], num_drafts: int
    ) -> tuple[list[int], str | None]:
        """Take in what a step sampled; returns the tokens kept, and why the request ends, if it does."""
        assert request.awaited.pop(0) == step
        if request in self.running:
            request.computed -= num_drafts - (len(tokens) - 1)
        for count, token in enumerate(tokens, 1):
            reason = self.accept(request, token)
            if reason is not None:
                return tokens[:count], reason
        if request in self.running:
            self.offer(request)
        return tokens, None

    def propose(self, req_id: str, drafts: list[int]) -> None:
        request = self.find(req_id)
        if request is None or request.grammar_length is not None:
            return
        if request in self.running and request.computed + 1 == len(request.tokens):
            request.drafts = drafts[: self.limits.lookahead]

    def accept(self, request: ReferenceRequest, token: int) -> str | None:
        """Append a sampled token; return why the request ends with it, if it does."""
        request.tokens.append(token)
        params = request.params
        num_output = len(request.tokens) - request.num_prompt
        is_eos = token == params.eos_token_id and not params.ignore_eos
        reason = None
        is_end = (is_eos or token in params.stop_token_ids) and num_output >= params.min_tokens
        if is_end or num_output == request.grammar_length:
            reason = "stop"
        elif len(request.tokens) >= self.total_limit(request.num_prompt, params):
            reason = "length"
        if reason is not None:
            self.finish(request.req_id)
        return reason
