"""A slow scheduler to compare with: plain lists, nothing incremental."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, zip_longest

from nbengine.kv_cache.specs import LayerRule
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.pause import PauseState
from tests.unit.scheduler.layered_model import PLAIN, Rules, first_visible, tables_of
from tests.unit.scheduler.reference_pool import ReferencePool
from tests.unit.scheduler.reference_states import ReferenceRule, ReferenceStates, num_spare, worth_of_likely


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
    """Requests are scheduled while what was sampled for them is in flight."""
    stages: int = 1
    """Of a pipeline, among whose steps requests are shared out."""
    rules: Rules = PLAIN
    """Of the model's layers."""
    num_state_slots: int = 0
    spacing: int = 4
    """In blocks, of the checkpoints of recurrent states."""

    @property
    def longest_step(self) -> int:
        """The most tokens of a request for which a step makes room."""
        longest = min(self.budget, self.threshold) if self.chunked and self.threshold else self.budget
        return longest + self.lookahead


@dataclass
class ReferenceRequest:
    """A request, its tokens and its blocks."""

    req_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    order: tuple[int, int, float, int]
    """Priority, turn of its admission, arrival, number."""
    client: int = 0
    salt: str | None = None
    computed: int = 0
    table: list[int | None] = field(default_factory=list)
    """The blocks of all tables, column by column."""
    offered: int = 0
    """Blocks of each table that have been put into the cache."""
    room: int = 0
    """Tokens up to which it does not ask for room."""
    made: dict[int, int] = field(default_factory=dict)
    """Checkpoints that nobody can find yet: the worth of each by its number of tokens."""
    fork: int = 0
    """Tokens after which it parts from others, if there should be a state and is none."""
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
    """The plan that one step must have."""

    scheduled: list[tuple[str, int]] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    resumed: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    checkpoints: dict[str, list[int]] = field(default_factory=dict)
    """The numbers of tokens after which the state is kept."""


class ReferenceScheduler:
    """The policy written down as directly as possible."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.tables = tables_of(limits.rules)
        spare = num_spare(limits.num_state_slots, limits.max_num_seqs, caching=limits.caching)
        self.states = ReferenceStates(limits.num_state_slots, spare)
        self.pool = ReferencePool(limits.num_blocks, self.states.give_up)
        self.rule = ReferenceRule(limits.block_size, limits.spacing * limits.block_size, spare * 3 // 4)
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
        self.line: list[tuple[int, int]] = []
        """Priority and client of those with requests that have not begun, in the order of their turns."""
        self.turn = 0
        self.newest_client: int | None = None

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
        """Return whether the request could not be run to its end even alone."""
        limits = self.limits
        if not 1 <= len(prompt) < limits.max_model_len:
            return True
        if not limits.chunked and len(prompt) > limits.budget:
            return True
        # The last token of all is sampled, never computed.
        slots = min(self.total_limit(len(prompt), params) - 1 + limits.lookahead, limits.max_model_len)
        return self.most_blocks(slots) > limits.num_blocks

    def most_blocks(self, num_tokens: int) -> int:
        return sum(self.most_of_table(rule, num_tokens) for rule in self.tables)

    def most_of_table(self, rule: LayerRule, num_tokens: int) -> int:
        """Count the blocks that a table needs at a time, wherever what is kept begins."""
        whole, size = self.blocks_for(num_tokens), self.limits.block_size
        if rule.kind == "full":
            return whole
        kept = min(num_tokens, rule.size - 1 + self.limits.longest_step)
        return min(whole, max(len({(first + i) // size for i in range(kept)}) for first in range(size)))

    def columns(self, request: ReferenceRequest) -> int:
        return len(request.table) // len(self.tables) if self.tables else 0

    def first_column(self, rule: LayerRule, num_computed: int) -> int:
        return first_visible(rule, num_computed) // self.limits.block_size

    def give_back(self, request: ReferenceRequest) -> None:
        """Give back the blocks of tokens that no query from the next on sees."""
        for column in range(self.columns(request)):
            for number, rule in enumerate(self.tables):
                place = column * len(self.tables) + number
                is_seen = column >= self.first_column(rule, request.computed)
                if not is_seen and request.table[place] is not None:
                    self.pool.free_one(request.table[place])
                    request.table[place] = None

    def grow(self, request: ReferenceRequest, columns: int, end: int, count: int) -> None:
        """Take blocks until the tables have that many columns, and note when to ask again."""
        while self.tables and len(request.table) < columns * len(self.tables):
            request.table.append(self.pool.take_one())
        has_windows = any(rule.kind != "full" for rule in self.tables)
        room = self.columns(request) * self.limits.block_size if self.tables else self.limits.max_model_len
        request.room = end if has_windows and count > 1 else room

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
        by_priority = self.limits.policy == "priority"
        order = (priority, 0, arrival, self.added) if by_priority else (0, 0, 0.0, self.added)
        self.added += 1
        if (order[0], client) not in self.line:
            self.line.append((order[0], client))
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
        self.leave_line(request)
        self.finished.add(req_id)
        self.preempted.discard(req_id)

    def release_blocks(self, request: ReferenceRequest) -> None:
        while request.table:
            block = request.table.pop()
            if block is not None:
                self.pool.free_one(block)
        request.offered = 0
        if self.limits.num_state_slots and request in self.running:
            known = [(self.content(request, place), worth) for place, worth in self.settled(request)]
            self.states.end(known, len(request.made))
            request.made = {}

    def settled(self, request: ReferenceRequest) -> list[tuple[int, int]]:
        """The checkpoints whose tokens are known by now."""
        return [(place, worth) for place, worth in request.made.items() if place <= len(request.tokens)]

    def content(self, request: ReferenceRequest, place: int) -> object:
        """Return what the state after that many tokens depends on."""
        return self.prefix(request, place // self.limits.block_size - 1)

    def prefix(self, request: ReferenceRequest, index: int, number: int = 0) -> object:
        return (number, request.salt, tuple(request.tokens[: (index + 1) * self.limits.block_size]))

    def lookup(self, request: ReferenceRequest) -> tuple[int, list[int | None]]:
        """Return the most columns from which all tables and the state can go on, and their blocks."""
        if not self.limits.caching or request.params.prompt_logprobs is not None:
            return 0, []
        contents, size = self.pool.contents, self.limits.block_size
        request.fork = 0
        for columns in range((len(request.tokens) - 1) // size, 0, -1):
            found: list[int | None] = []
            for column in range(columns):
                for number, rule in enumerate(self.tables):
                    wanted = self.prefix(request, column, number)
                    is_seen = column >= self.first_column(rule, columns * size)
                    is_there = is_seen and wanted in contents
                    found.append(contents.index(wanted) if is_there else (-1 if is_seen else None))
            if -1 in found:
                continue
            if not self.limits.num_state_slots or self.states.find(self.prefix(request, columns - 1)):
                return columns, found
            if self.tables and not request.fork:
                request.fork = columns * size
        return 0, []

    def offer(self, request: ReferenceRequest) -> None:
        """Put the full blocks of known, computed tokens into the cache, once each."""
        pool, size = self.pool, self.limits.block_size
        if not self.limits.caching:
            return
        while (request.offered + 1) * size <= min(request.computed, len(request.tokens)):
            for number in range(len(self.tables)):
                content = self.prefix(request, request.offered, number)
                block = request.table[request.offered * len(self.tables) + number]
                if block is None:
                    continue
                if content in pool.contents:
                    duplicate = pool.contents.index(content)
                    pool.contents[duplicate] = None
                    if pool.holders[duplicate] == 0:
                        pool.least_recent_first.remove(duplicate)
                        pool.blank.append(duplicate)
                pool.contents[block] = content
            request.offered += 1

    def slots_after(self, request: ReferenceRequest, computed: int, count: int) -> int:
        return min(computed + count + self.limits.lookahead, self.limits.max_model_len)

    def chunk(self, count: int, budget: int) -> int:
        if self.limits.chunked and self.limits.threshold:
            count = min(count, self.limits.threshold)
        return min(count, budget)

    def wanted(self, request: ReferenceRequest) -> int:
        """Count the tokens that a running request would compute next: known ones, drafts, or one in
        flight."""
        known, limit = len(request.tokens), self.total_limit(request.num_prompt, request.params)
        if request.computed < known:
            return known - request.computed + min(len(request.drafts), limit - known - 1)
        ahead = self.limits.ahead and self.limits.lookahead == 0 and self.limits.stages == 1
        return 1 if ahead and known + len(request.awaited) < limit else 0

    def schedule(self) -> ReferencePlan:
        plan = ReferencePlan(finished=self.finished, preempted=self.preempted)
        self.finished, self.preempted = set(), set()
        self.states.pinned = []
        for request in self.states.makers:
            for place, worth in self.settled(request):
                self.states.keep(self.content(request, place), worth)
                del request.made[place]
        self.states.makers = [request for request in self.states.makers if request.made]
        if self.pause is not PauseState.PAUSED_ALL:
            preemptions = self.preemptions
            budget = self.continue_running(plan)
            if self.preemptions == preemptions:
                self.admit(plan, budget)
            while not plan.scheduled and self.preemptions > preemptions:
                # Those whose turn it was are gone: it is the others' turn.
                preemptions = self.preemptions
                self.continue_running(plan)
        self.make_checkpoints(plan)
        self.steps += 1
        return plan

    def make_checkpoints(self, plan: ReferencePlan) -> None:
        if not (self.limits.num_state_slots and self.limits.caching):
            return
        wanted = []
        for number, (req_id, count) in enumerate(plan.scheduled):
            request = self.find(req_id)
            assert request is not None
            for place in range(request.computed - count + 1, request.computed + 1):
                if place % self.limits.block_size == 0:
                    worth = self.rule.worth(place, request.num_prompt, request.fork)
                    wanted += [(-worth, number, place)] if worth else []
        met = []
        for minus_worth, number, place in sorted(wanted):
            request = self.find(plan.scheduled[number][0])
            assert request is not None
            content = self.content(request, place) if place <= len(request.tokens) else None
            if content in met:
                continue
            if content is not None and self.states.find(content):
                self.states.use(content, -minus_worth)
            elif self.states.take_one(-minus_worth):
                met += [] if content is None else [content]
                plan.checkpoints.setdefault(request.req_id, []).append(place)
                plan.checkpoints[request.req_id].sort()
                request.made[place] = -minus_worth
                if request not in self.states.makers:
                    self.states.makers.append(request)

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
        """Return the most requests that a step may sample for: of all requests one part in as many as there
        are stages, or of those that are in no step one part in as many as there are steps to come. Both are
        rounded up, and the smaller one counts."""
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
        """Return the most requests that the step may sample for when waiting ones have joined."""
        if self.limits.stages == 1:
            return self.limits.max_num_seqs
        free, fitting = self.pool.num_free(), 0
        places = self.limits.max_num_seqs - len(self.running)
        if self.limits.num_state_slots:
            places = min(places, self.states.num_admissible())
        for request in self.candidates()[:places]:
            free -= self.most_blocks(len(request.tokens))
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
        end = self.slots_after(request, request.computed, count)
        if request.computed + count + self.limits.lookahead <= request.room:
            return True
        wanted = self.blocks_for(end)
        self.give_back(request)
        while wanted * len(self.tables) - len(request.table) > self.pool.num_free():
            victim = max(self.running, key=lambda r: r.order)
            self.preempt(victim, preempted)
            if victim is request:
                return False
        self.grow(request, wanted, end, count)
        return True

    def preempt(self, victim: ReferenceRequest, preempted: set[str]) -> None:
        self.release_blocks(victim)
        self.running.remove(victim)
        self.waiting.append(victim)
        victim.computed = 0
        victim.drafts = []
        victim.was_preempted = True
        victim.resumable_after = self.steps - 1
        preempted.add(victim.req_id)
        self.preemptions += 1

    def forget_all(self) -> bool:
        """Forget all blocks and states, unless a request holds some."""
        if self.states.num_free() < self.states.num_slots or not self.pool.forget_all():
            return False
        self.states.forget_all()
        return True

    def preempt_all(self) -> None:
        for victim in sorted(self.running, key=lambda r: r.order, reverse=True):
            self.preempt(victim, self.preempted)

    def unbegun(self) -> list[ReferenceRequest]:
        return [r for r in self.waiting if not r.was_preempted]

    def leave_line(self, request: ReferenceRequest) -> None:
        """Take a request out of its client's line, if it waits there."""
        place = (request.order[0], request.client)
        if place in self.line and place not in [(r.order[0], r.client) for r in self.unbegun()]:
            self.line.remove(place)

    def in_waiting_order(self) -> list[ReferenceRequest]:
        """The waiting requests as they would be admitted: clients of a priority in turn, and before each of them those
        preempted ones that would be before it among those that run."""
        by_order = sorted(self.waiting, key=lambda r: r.order)
        begun = [r for r in by_order if r.was_preempted]
        lines: dict[tuple[int, int], list[ReferenceRequest]] = {place: [] for place in self.line}
        for request in by_order:
            if not request.was_preempted:
                lines[request.order[0], request.client].append(request)
        turn, newest, found = self.turn, self.newest_client, []
        for priority in sorted({priority for priority, _ in lines}):
            rounds = zip_longest(*[line for place, line in lines.items() if place[0] == priority])
            for request in filter(None, chain.from_iterable(rounds)):
                turn, newest = turn + (request.client != newest), request.client
                while begun and begun[0].order < (priority, turn, *request.order[2:]):
                    found.append(begun.pop(0))
                found.append(request)
        return found + begun

    def take_turn(self, request: ReferenceRequest) -> None:
        """Note that a request that waited is admitted."""
        self.waiting.remove(request)
        self.running.append(request)
        if request.was_preempted:
            return
        priority, _, arrival, number = request.order
        self.turn += request.client != self.newest_client
        self.newest_client = request.client
        request.order = (priority, self.turn, arrival, number)
        self.line.remove((priority, request.client))
        if any((r.order[0], r.client) == (priority, request.client) for r in self.unbegun()):
            self.line.append((priority, request.client))

    def candidates(self) -> list[ReferenceRequest]:
        """Waiting requests in order, as far as nobody blocks those behind."""
        found = []
        for request in self.in_waiting_order():
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
            columns, found = self.lookup(request)
            computed = columns * limits.block_size
            rest = len(request.tokens) - computed
            if not limits.chunked and budget < rest <= limits.budget:
                break
            count = self.chunk(rest, budget)
            end = self.slots_after(request, computed, count)
            planned = self.blocks_for(end)
            held = [block for block in found if block is not None]
            missing = 0
            for rule in self.tables:
                passed, whole = self.first_column(rule, computed), self.blocks_for(len(request.tokens))
                most = min(whole - passed, self.most_of_table(rule, len(request.tokens)))
                missing += max(most - (columns - passed), 0)
            must_fit = max(missing, (planned - columns) * len(self.tables))
            if must_fit > self.pool.num_free() - sum(1 for b in held if self.pool.holders[b] == 0):
                break
            if limits.num_state_slots and not self.states.start(
                self.prefix(request, columns - 1) if columns else None,
                worth_of_likely(computed) if columns and limits.caching else 0,
            ):
                break
            for block in held:
                self.pool.share_one(block)
            request.table += found
            self.grow(request, planned, end, count)
            self.take_turn(request)
            request.computed = computed
            request.offered = columns
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
