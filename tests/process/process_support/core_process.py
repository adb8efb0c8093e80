"""An engine core in lock step without a host: takes turns as it is told to.

Commands are lines of JSON on stdin, each answered by one on stdout: `start` an engine core, `take` turns, `change` the
group. In a turn it starts one batch, a dummy one if there is nothing to compute, as the protocol of waves wants it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from nbengine.config import EngineArgs
from nbengine.engine.core.core import EngineCore
from nbengine.executor.choice import executor_class
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.models.checkpoints.files import resolve_model
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.sampling_params import SamplingParams


class Core:
    """The engine core of this process, once there is one."""

    def __init__(self) -> None:
        self._core: EngineCore | None = None

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise AssertionError("start comes first")
        return self._core

    def start(self, arguments: dict[str, Any], parallel: dict[str, Any], directory: str) -> dict[str, Any]:
        """Load the model, or make room for it if it comes from others later."""
        config = EngineArgs(**arguments).create_engine_config(bound=False)
        config = dataclasses.replace(
            config,
            model=resolve_model(config.model),
            parallel=dataclasses.replace(config.parallel, **parallel),
        )
        files = ExecutorFiles(directory, directory, engine="cores")
        self._core = EngineCore(config, executor_class(config), None, parallel["data_parallel_rank"], files)
        return {"weights_bytes": self._weights_bytes()}

    def take(self, turns: int, prompts: dict[str, list[int]], max_tokens: int) -> dict[str, Any]:
        """Add requests, then take `turns` turns; return the new tokens by request."""
        for request_id, prompt in prompts.items():
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            request, _ = self.core.preprocess_add_request(EngineCoreRequest(request_id, prompt, params))
            self.core.add_request(request)
        tokens: dict[str, list[int]] = {}
        for _ in range(turns):
            for request_id, new in self._take_turn():
                tokens.setdefault(request_id, []).extend(new)
        return {"tokens": tokens, "unfinished": self.core.scheduler.has_unfinished_requests()}

    def change(self, before: int, after: int, init_method: str) -> dict[str, Any]:
        """Become one of another number of engine cores."""
        self.core.model_executor.reconfigure_data_parallel(before, after, init_method)
        return {"weights_bytes": self._weights_bytes()}

    def close(self) -> dict[str, Any]:
        """End the workers."""
        self.core.shutdown()
        return {}

    def _take_turn(self) -> list[tuple[str, list[int]]]:
        outputs, executed = self.core.step()
        if not executed:
            self.core.model_executor.execute_dummy_batch().result()
        return [(one.request_id, one.new_token_ids) for all_of in outputs.values() for one in all_of.outputs]

    def _weights_bytes(self) -> list[int]:
        return [worker.weights_bytes for worker in self.core.model_executor.worker_info()]


def main() -> None:
    """Obey until stdin ends."""
    core = Core()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(core, command.pop("do"))(**command)
        except Exception as error:  # noqa: BLE001
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
