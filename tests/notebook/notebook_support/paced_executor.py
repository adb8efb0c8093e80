"""An executor that writes words at a steady pace, so that tests can watch a stream and break into it.

`hf_overrides` of the configuration set its knobs: `tokens_per_second`, `load_seconds` for a slow start,
`times_file`, to which the `time.monotonic()` of each token is written, and `slow_file`: while there is such a file, a
token takes `SLOW_INTERVAL` seconds.
"""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import Future

from nbengine.executor.base import Executor
from nbengine.ipc.control_messages import Progress, WorkerInfo
from nbengine.ipc.messages import LogprobsLists
from nbengine.kv_cache.sizing import RankCacheSpec
from nbengine.scheduler.output import ModelRunnerOutput

SLOW_INTERVAL = 0.1
FIRST_TOKEN, LAST_TOKEN = 32, 57
"""A to Z in the tokenizer of random-tiny."""


class PacedExecutor(Executor):
    def __init__(self, config, progress=None, files=None):
        knobs = config.model.hf_overrides
        self.interval = 1 / knobs.get("tokens_per_second", 100)
        self.slow_file = knobs.get("slow_file", "")
        self.next_step = 0.0
        self.block_size = config.cache.block_size
        self.prompt_length = {}
        self.last_token = {}
        self.num_logprobs = {}
        if progress is not None:
            progress(Progress("load", "the model that writes the alphabet", 0.5))
        times_file = knobs.get("times_file")
        self.times = open(times_file, "a", buffering=1) if times_file else None  # noqa: SIM115
        time.sleep(knobs.get("load_seconds", 0))

    def collective_rpc(self, method, args=(), kwargs=None, *, timeout=None, non_block=False):
        answers = {
            "model_info": {
                "device": "cpu",
                "dtype": "float32",
                "weights_bytes": 4,
                "max_position_embeddings": 100_000,
                "vocab_size": 258,
            },
            "determine_available_memory": 1 << 20,
            "get_kv_cache_spec": RankCacheSpec(1, 1, 4, 4, self.block_size),
            "check_kv_cache_fits": None,
            "initialize_kv_cache": None,
            "worker_info": WorkerInfo(0, 0, 0, os.getpid(), "cpu", 4, 1 << 20, 0, 1),
        }
        return [answers[method]]

    def execute_model(self, scheduler_output, *, non_block=False):
        for request_id in scheduler_output.finished_req_ids:
            self.prompt_length.pop(request_id, None)
            self.last_token.pop(request_id, None)
            self.num_logprobs.pop(request_id, None)
        if scheduler_output.total_num_scheduled_tokens:
            self.keep_pace()
        future = Future()
        future.set_result(self.sample(scheduler_output))
        return future if non_block else future.result()

    def keep_pace(self):
        now = time.monotonic()
        interval = SLOW_INTERVAL if os.path.exists(self.slow_file) else self.interval
        self.next_step = max(self.next_step + interval, now)
        time.sleep(self.next_step - now)

    def sample(self, plan):
        computed = {}
        for new in plan.scheduled_new_reqs:
            self.prompt_length[new.req_id] = len(new.token_ids)
            self.last_token[new.req_id] = LAST_TOKEN
            self.num_logprobs[new.req_id] = new.sampling_params.logprobs
            computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for request_id, count in plan.num_scheduled_tokens.items():
            done = computed[request_id] + count >= self.prompt_length[request_id]
            sampled.append([self.next_token(request_id)] if done else [])
        req_ids = list(plan.num_scheduled_tokens)
        logprobs = {
            request_id: logprobs_of(tokens[0], self.num_logprobs[request_id])
            for request_id, tokens in zip(req_ids, sampled, strict=True)
            if tokens and self.num_logprobs[request_id] is not None
        }
        return ModelRunnerOutput(req_ids, sampled, logprobs or None)

    def next_token(self, request_id):
        last = self.last_token[request_id]
        if self.times is not None:
            self.times.write(f"{time.monotonic()}\n")
        token = self.last_token[request_id] = FIRST_TOKEN if last >= LAST_TOKEN else last + 1
        return token

    def sample_tokens(self, grammar_output=None):
        raise NotImplementedError

    def check_health(self):
        return

    def shutdown(self):
        return


def logprobs_of(token, count):
    """Make log probabilities as if what follows in the alphabet had been half as likely, and so on."""
    likely = list(range(token, token + count))
    values = [-(number + 1) * math.log(2) for number in range(count)]
    return LogprobsLists([[token, *likely]], [[-math.log(2), *values]], [1])
