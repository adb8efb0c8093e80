"""Check the engine on a machine with a CUDA GPU: run the tests marked `gpu`, then the engine on the GPU.

The engine's greedy float32 tokens must be those of the CPU, and its throughput is reported. It needs no
network: the models are made from a seed. It uses the Python that runs it.

python benchmarks/gpu_check.py [--json PATH]
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import machine, parser

ROOT = Path(__file__).parents[1]
NEEDED = [
    "gguf",
    "huggingface_hub",
    "hypothesis",
    "jinja2",
    "jupyter_core",
    "llvmlite",
    "msgspec",
    "numpy",
    "psutil",
    "pytest",
    "pytest_asyncio",
    "pytest_timeout",
    "safetensors",
    "setproctitle",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
    "triton",
    "zmq",
]
MOST_WORKERS = 8
REQUESTS = 64
OUTPUT_TOKENS = 128
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""The shape of a model of about a billion parameters."""


def missing_modules() -> list[str]:
    """List the modules that are needed and not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def run_gpu_tests(report: Path) -> dict[str, Any]:
    """Run the tests marked `gpu`; return counts and the names of those that failed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/kernels", f"--junitxml={report}"]
    if importlib.util.find_spec("xdist") is not None:
        # Most of the time goes to compiling kernels. Plugins that happen to be installed may object.
        command += ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1)), "-p", "no:benchmark"]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    suite = ElementTree.parse(report).getroot().find("testsuite")
    if suite is None:
        raise RuntimeError(f"no test report in {report}")
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    return {"exit status": status, **counts, "failed": failed}


def tokens_on(device: str) -> list[list[int]]:
    """Return greedy float32 tokens of the small random model on one device."""
    from nbengine import LLM, SamplingParams

    chooser = random.Random(0)
    prompts = [{"prompt_token_ids": chooser.choices(range(256), k=length)} for length in (1, 17, 64, 200)]
    with LLM("random-tiny", device=device, dtype="float32", num_gpu_blocks_override=256) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=48, ignore_eos=True), use_tqdm=False
        )
    return [output.outputs[0].token_ids for output in outputs]


def large_model(directory: Path) -> Path:
    """Make a random model of the shape `LARGE` in bfloat16, with the tokenizer of the small one."""
    import torch
    from safetensors.torch import save_file

    from nbengine.config import ModelConfig
    from nbengine.models.checkpoints.files import resolve_model
    from nbengine.models.families.decoder import DecoderForCausalLM
    from nbengine.models.registry import decoder_config

    small = Path(resolve_model(ModelConfig("random-tiny")).directory)
    for file in small.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((small / "config.json").read_text()), **LARGE, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    model = DecoderForCausalLM(decoder_config(config), dtype=torch.bfloat16, device=torch.device("cpu"))
    torch.manual_seed(0)
    slots = model.weight_slots()
    weights = {
        name: torch.randn(slot.full_shape).mul_(0.02).to(torch.bfloat16) for name, slot in slots.items()
    }
    save_file(weights, directory / "model.safetensors")
    return directory


def throughput(model: Path, *, enforce_eager: bool) -> dict[str, float]:
    """Measure the output tokens a second of one stream and of `REQUESTS` at once, median of three runs."""
    from nbengine import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    chooser = random.Random(0)
    figures = {}
    with LLM(str(model), device="cuda", dtype="bfloat16", enforce_eager=enforce_eager) as llm:
        for count in (1, REQUESTS):
            seconds = []
            for _ in range(4):
                prompts = [{"prompt_token_ids": chooser.choices(range(256), k=128)} for _ in range(count)]
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds.append(time.perf_counter() - start)
            figures[f"tok/s at {count}"] = count * OUTPUT_TOKENS / statistics.median(seconds[1:])
    return figures


def main() -> int:
    """Run the checks; return 0 when the tests passed and the tokens are equal."""
    arguments = parser(__doc__).parse_args()
    if missing := missing_modules():
        print(
            f"gpu-check: {sys.executable} lacks {', '.join(missing)}; put them on PYTHONPATH", file=sys.stderr
        )
        return 2
    import torch

    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device on this machine", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, str(ROOT))
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "machine": machine(),
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory(prefix="nbg-") as directory:
        os.environ.setdefault("NBENGINE_RUNTIME_DIR", directory)
        result["tests"] = run_gpu_tests(Path(directory) / "junit.xml")
        result["tokens equal those of the CPU"] = tokens_on("cuda") == tokens_on("cpu")
        model = Path(directory) / "model"
        model.mkdir()
        large_model(model)
        result["throughput, 1 B parameters, bfloat16"] = {
            name: throughput(model, enforce_eager=eager)
            for name, eager in (("decode steps as graphs", False), ("without graphs", True))
        }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if result["tests"]["exit status"] == 0 and result["tokens equal those of the CPU"] else 1


if __name__ == "__main__":
    sys.exit(main())
