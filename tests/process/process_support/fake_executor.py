"""An executor with a model that adds one: the next token is the last one plus 1, modulo the vocabulary. Of a prompt
given as embeddings, the very last number stands for the last token.

`hf_overrides` of the configuration set its knobs: `vocab_size`, `max_position_embeddings`, `step_seconds` (how
long a step takes), `slow` (a path: a step takes a fifth of a second while that file is there), `hold` (a path:
no step ends while that file is there), `hog` (a path: a step removes that file and keeps the interpreter to
itself for as many microseconds as are written there), `hidden_size`, `fail_load` (a message), `load_seconds`,
`hold_load` (a path: no load ends while that file is there), `hold_start` (a path: no load begins, or is
reported, while that file is there), `fail_at_token` (a token id that breaks the model), `fail_wake_up` (a
message), `workers` (how many there seem to be: all rows of the board are written by this process, worker r
holding 1000 + r bytes and taking r seconds longer than `step_seconds`). While it sleeps it cannot compute.

Every token t has the log probability -t, so that the likeliest are 0, 1, 2, and t has the rank t + 1.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nbengine.errors import EngineStartError
from nbengine.executor.base import Executor
from nbengine.ipc.control_messages import Progress, WorkerInfo
from nbengine.ipc.messages import LogprobsLists
from nbengine.ipc.utilities import ProfileReport
from nbengine.kv_cache.sizing import RankCacheSpec
from nbengine.runtime.worker_board import WorkerBoard
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

VOCAB_SIZE = 1000


def rows(token_ids: list[int], count: int) -> LogprobsLists:
    ids = [[token_id, *range(count)] for token_id in token_ids]
    return LogprobsLists(ids, [[-float(i) for i in row] for row in ids], [t + 1 for t in token_ids])


class FakeExecutor(Executor):
    def __init__(self, config, progress=None, files=None):
        self.knobs: dict[str, Any] = config.model.hf_overrides
        self.block_size = config.cache.block_size
        self.vocab_size = self.knobs.get("vocab_size", VOCAB_SIZE)
        self.available_bytes = config.cache.kv_cache_memory_bytes or 1 << 20
        self.last_token: dict[str, int] = {}
        self.given_back: set[str] = set()
        self.rpc_calls: list[tuple[Any, ...]] = []
        self.logprobs: dict[str, int] = {}
        self.prompt_logprobs: dict[str, LogprobsLists] = {}
        self.num_blocks = 0
        self.num_workers = self.knobs.get("workers", 1)
        self.board, self.rows_of_workers = self.make_board(files)
        while os.path.exists(self.knobs.get("hold_start", "")):
            time.sleep(0.001)
        if progress is not None:
            progress(Progress("load", "the model that adds one", 0.5))
        while os.path.exists(self.knobs.get("hold_load", "")):
            time.sleep(0.001)
        time.sleep(self.knobs.get("load_seconds", 0))
        if "fail_load" in self.knobs:
            raise RuntimeError(self.knobs["fail_load"]) from ValueError("the root of it")

    def make_board(self, files):
        """Make as many workers as asked for, all in this process; each maps the page of its row for
        itself."""
        if files is None:
            board = WorkerBoard.private(self.num_workers)
            return board, [board.row(rank) for rank in range(self.num_workers)]
        board = WorkerBoard.create(files.shared_memory, self.num_workers)
        attached = [WorkerBoard.attach(board.path, self.num_workers) for _ in range(self.num_workers)]
        board.unlink()
        return board, [page.row(rank) for rank, page in enumerate(attached)]

    def worker_info(self):
        cache_bytes = self.num_blocks * RankCacheSpec(1, 1, 4, 4, self.block_size).page_size_bytes
        return [
            WorkerInfo(rank, rank, 0, os.getpid(), "cpu", 4, cache_bytes, 0, 1)
            for rank in range(self.num_workers)
        ]

    def worker_stats(self):
        return self.board.read()

    def collective_rpc(self, method, args=(), kwargs=None, *, timeout=None, non_block=False):
        self.rpc_calls.append((method, *args))
        if method == "initialize_kv_cache":
            self.num_blocks, _ = args
        if method == "sleep":
            self.given_back = {"weights", "kv_cache"}
            if "fail_sleep" in self.knobs:
                raise RuntimeError(self.knobs["fail_sleep"])
        if method == "wake_up":
            if "fail_wake_up" in self.knobs:
                raise EngineStartError(self.knobs["fail_wake_up"])
            self.given_back.remove(*args)
        answers = {
            "model_info": {
                "device": "cpu",
                "dtype": "float32",
                "weights_bytes": 4,
                "max_position_embeddings": self.knobs.get("max_position_embeddings", 512),
                "vocab_size": self.vocab_size,
                "hidden_size": self.knobs.get("hidden_size", 4),
            },
            "determine_available_memory": self.available_bytes,
            "get_kv_cache_spec": RankCacheSpec(1, 1, 4, 4, self.block_size),
            "check_kv_cache_fits": None,
            "initialize_kv_cache": None,
            "sleep": None,
            "check_wake_up": None,
            "wake_up": None,
            "start_profile": None,
            "stop_profile": ProfileReport(["trace"], 3, "summary"),
        }
        return [answers[method]]

    def execute_model(self, scheduler_output, *, non_block=False):
        future: Future[ModelRunnerOutput | None] = Future()
        future.set_result(self.run(scheduler_output))
        return future if non_block else future.result()

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if plan.total_num_scheduled_tokens:
            if self.given_back:
                raise RuntimeError(f"computing without {self.given_back}")
            is_slow = os.path.exists(self.knobs.get("slow", ""))
            seconds = 0.2 if is_slow else self.knobs.get("step_seconds", 0)
            if seconds > 60:
                logger.warning("an endless step begins")
            time.sleep(seconds)
            self.wait_while_held()
            for rank, row in enumerate(self.rows_of_workers):
                row.set_memory(1000 + rank)
                row.end_step(seconds + rank)
        for request_id in plan.finished_req_ids:
            self.last_token.pop(request_id, None)
            self.logprobs.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            self.last_token[new.req_id] = new.token_ids[-1]
            if new.prompt_embeds is not None:
                self.last_token[new.req_id] = int(new.prompt_embeds[-1, -1])
            params = new.sampling_params
            if params.logprobs is not None:
                self.logprobs[new.req_id] = params.logprobs
            if params.prompt_logprobs is not None:
                self.prompt_logprobs[new.req_id] = rows(new.token_ids[1:], params.prompt_logprobs)
        sampled = [
            [] if request_id in plan.incomplete_req_ids else [self.next_token(request_id)]
            for request_id in plan.num_scheduled_tokens
        ]
        output = ModelRunnerOutput(list(plan.num_scheduled_tokens), sampled)
        tokens = dict(zip(output.req_ids, sampled, strict=True))
        output.logprobs = {
            name: rows(tokens[name], k) for name, k in self.logprobs.items() if tokens.get(name)
        }
        done_prompts = [name for name in self.prompt_logprobs if tokens.get(name)]
        output.prompt_logprobs = {name: self.prompt_logprobs.pop(name) for name in done_prompts}
        return output

    def wait_while_held(self) -> None:
        hold = self.knobs.get("hold", "")
        if os.path.exists(hold):
            logger.warning("a step is held")
        while os.path.exists(hold):
            time.sleep(0.001)
        hog = Path(self.knobs.get("hog", "none"))
        if hog.exists():
            microseconds = int(hog.read_text())
            hog.unlink()
            # As a regular expression does, or another function in C that does not let go of the interpreter.
            ctypes.PyDLL(None).usleep(microseconds)

    def next_token(self, request_id: str) -> int:
        token = (self.last_token[request_id] + 1) % self.vocab_size
        if token == self.knobs.get("fail_at_token"):
            raise RuntimeError(f"the model broke at token {token}")
        self.last_token[request_id] = token
        return token

    def sample_tokens(self, grammar_output=None):
        raise NotImplementedError

    def check_health(self):
        return

    def shutdown(self):
        return


class AsyncFakeExecutor(FakeExecutor):
    """The same model on a thread of its own, with two steps in flight."""

    max_concurrent_batches = 2
    async_scheduling = True

    def __init__(self, config, progress=None, files=None):
        super().__init__(config, progress, files)
        self.thread = ThreadPoolExecutor(1)
        self.output: ModelRunnerOutput | None = None

    def execute_model(self, scheduler_output, *, non_block=False):
        assert non_block
        return self.thread.submit(self.execute, scheduler_output)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        output = self.run(plan)
        if not plan.total_num_scheduled_tokens:
            return output
        self.output = output
        return None

    def sample_tokens(self, grammar_output=None, *, non_block=False):
        assert non_block
        return self.thread.submit(lambda: self.output)

    def shutdown(self):
        self.thread.shutdown(cancel_futures=True)
