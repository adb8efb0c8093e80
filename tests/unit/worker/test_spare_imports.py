"""A spare core has imported what an ordinary engine needs, so that its start waits for no import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import sys
from nbengine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from nbengine.models.checkpoints.files import resolve_model
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from nbengine.engine.spare import CORE_MODULES
from nbengine.runtime.imports import import_for_later

model = resolve_model(ModelConfig({directory!r}, tokenizer="none", device="cpu", {asked}))
import_for_later(CORE_MODULES)
imported = set(sys.modules)
from nbengine.worker.worker import Worker

worker = Worker(EngineConfig(model, CacheConfig(block_size=16), SchedulerConfig(max_num_seqs=2)))
worker.init_device()
worker.load_model()
worker.initialize_kv_cache(8)
params = SamplingParams(temperature=0, max_tokens=4)
new = NewRequestData("a", [3, 4, 5, 6], params, [0], 0)
assert worker.execute_model(SchedulerOutput([new], CachedRequestData(), {{"a": 4}}, 4, set())) is None
assert worker.sample_tokens().sampled_token_ids
# No thread may be at work when the interpreter ends.
worker.shutdown()
print(*sorted(name for name in set(sys.modules) - imported if name.startswith("nbengine.")))
"""


@pytest.mark.parametrize("asked", ["", "dtype='bfloat16'", "quantization='int4'"])
def test_a_start_and_a_step_import_nothing_more(asked: str, tiny_directory: Path) -> None:
    script = START.format(directory=str(tiny_directory), asked=asked)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
