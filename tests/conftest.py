"""Fixtures for every kind of test: private directories, and transformers as the oracle."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.support.thorough import amount
from tests.tools import scratch
from tests.tools.durations import recorded_seconds
from tests.tools.side_by_side import imports_transformers

SUPPORT = Path(__file__).parent / "support"
LEFT_OUT = str(SUPPORT / "left_out")
sys.path.insert(0, str(SUPPORT))
# Here, and in all processes that tests start.
sys.path.insert(0, LEFT_OUT)
if LEFT_OUT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (LEFT_OUT, os.environ.get("PYTHONPATH"))))
pytest.register_assert_rewrite("parallel_support")

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TokenChecker = Callable[[list[int], list[int]], None]

TOGETHER = ("tests/process/ray/", "tests/notebook/cockpit/", "tests/notebook/lab/")
"""A Ray cluster serves all its tests, and there is one at a time. A JupyterLab and a page with it take as long as many a
test: two processes have them."""

SCRATCH = pytest.StashKey[scratch.Scratch | None]()

FEW_MODULES = 20
_modules_out_of_sight = 0

APART = ("tests/simulation/", "tests/notebook/test_examples.py")
"""Many worlds, none of which knows of another, and notebooks, each of which starts its own engines."""

# Speed is asked for in benchmarks: a machine that does other things must not fail a test.
settings.register_profile(
    "nbengine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=amount(20, thorough=2000),
)
settings.load_profile("nbengine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while all that is made is here to stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Undo what `only_new_garbage` does, for what is counted at the interpreter's end; remove the scratch folder."""
    gc.unfreeze()
    folder = config.stash.get(SCRATCH, None)
    if folder is not None:
        for process in folder.leave():
            print(f"left by the tests, and ended: {process}", file=sys.stderr)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let tests interrupt themselves in the workers of pytest-xdist, too, which ignore interrupts. All of a run's
    processes share one scratch folder; only what is asked for by `--basetemp` is kept."""
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return
    folder = scratch.enter()
    config.stash[SCRATCH] = folder
    if folder is not None and config.option.basetemp is None:
        config.option.basetemp = str(folder.path / "p")


@functools.cache
def _imported(unit: str) -> str | None:
    """Return what the tests of a file of `tests/process` import that takes ten seconds: as few processes as can be import
    it, and the others run what does without."""
    if not unit.startswith("tests/process/") or not unit.endswith(".py"):
        return None
    if unit.startswith("tests/process/server/"):
        return "clients"
    return "transformers" if imports_transformers(unit) else None


class FileScheduling(LoadFileScheduling):
    """Tests of one file share their engines and stay in one process; those of `TOGETHER` share more, or would be in
    each other's way, and those of `APART` share nothing."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if file.startswith(APART):
            return nodeid
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    def _assign_work_unit(self, node: WorkerController) -> None:
        had = {process: {_imported(unit) for unit in units} for process, units in self.assigned_work.items()}
        own = had.pop(node, set())
        others = set().union(*had.values()) - own

        # What takes long comes first, so that no process is left with it when the others have finished. Notebooks leave
        # a browser's event loop and processes behind, which tests of processes must not find.
        def order(unit: str) -> tuple[bool, bool, bool, float]:
            imported = _imported(unit)
            is_known = imported is not None and imported in own
            leaves_much = unit.startswith("tests/notebook/")
            return not leaves_much, imported not in others, is_known, recorded_seconds(unit)

        self.workqueue.move_to_end(max(self.workqueue, key=order), last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that has ended a process, if one has, and give the others that it was to run to the rest.

        The library's own method has that test run again, which ends one process after the other.
        """
        units = self.assigned_work.pop(node)
        left = [
            (scope, test) for scope, unit in units.items() for test, is_done in unit.items() if not is_done
        ]
        if not left:
            return None
        scope, crashed = left[0]
        units[scope][crashed] = True
        # Of a unit without tests no process would ever report the end.
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """Return the scheduler that gives the files of tests to processes."""
    return FileScheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_written_behind() -> None:
    """Wait for what a test of the file before still writes in the background: in this file the functions that it calls
    may be others, as in a simulation."""
    kept_weights = sys.modules.get("nbengine.models.checkpoints.kept_weights")
    for thread in threading.enumerate():
        if kept_weights is not None and thread.name == kept_weights.THREAD_NAME:
            thread.join()


@pytest.fixture(scope="module", autouse=True)
def only_new_garbage() -> None:
    """Keep what was there before a file's first test, a million objects, out of the garbage collector's sight.

    Each engine that starts or ends asks for a look at everything, which would take a second. What the file before has
    left behind is collected first, so that its warnings are heard.
    """
    _put_out_of_sight()


@pytest.fixture(autouse=True)
def no_new_modules(only_new_garbage: None) -> None:
    """Do the same when a test has imported much, as transformers' modules are."""
    if len(sys.modules) > _modules_out_of_sight + FEW_MODULES:
        _put_out_of_sight()


def _put_out_of_sight() -> None:
    global _modules_out_of_sight
    gc.collect()
    gc.freeze()
    _modules_out_of_sight = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def private_runtime_dir() -> Iterator[Path]:
    """Keep connection files, logs and sockets of the tests apart from the user's own engines."""
    with tempfile.TemporaryDirectory(prefix="nbc-") as directory:
        previous = os.environ.get("NBENGINE_RUNTIME_DIR")
        os.environ["NBENGINE_RUNTIME_DIR"] = directory
        yield Path(directory)
        if previous is None:
            os.environ.pop("NBENGINE_RUNTIME_DIR")
        else:
            os.environ["NBENGINE_RUNTIME_DIR"] = previous


@pytest.fixture(scope="session")
def smollm2_read_by_transformers() -> Path:
    """The folder with what transformers has read of the default model's file: the model, and its tokenizer.

    To read that takes transformers many seconds: it stays in the tests' cache.
    """
    import transformers
    from filelock import FileLock

    from nbengine.config import ModelConfig
    from nbengine.models.checkpoints.files import resolve_model
    from nbengine.models.checkpoints.storage import cache_dir, make_directory, new_directory

    file = Path(resolve_model(ModelConfig("smollm2-135m")).weights[0]).resolve()
    of = (file.stat().st_size, file.stat().st_mtime_ns, transformers.__version__, version("gguf"))
    directory = cache_dir() / "oracles" / "-".join((file.stem, "with-tokenizer", *map(str, of)))
    with FileLock(make_directory(directory.parent) / f"{directory.name}.lock"):
        if not directory.exists():
            with new_directory(directory) as made:
                read_with_transformers(file).save_pretrained(made)
                with gguf_files_read_once():
                    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
                tokenizer.save_pretrained(made)
        os.utime(directory)
    return directory


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_read_by_transformers: Path) -> PreTrainedModel:
    """The default model in transformers, float32, from the same GGUF file."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_read_by_transformers, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@contextlib.contextmanager
def gguf_files_read_once() -> Iterator[None]:
    """Let transformers read each part of a GGUF file once, which takes it a second each time."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        yield


def read_with_transformers(file: Path) -> PreTrainedModel:
    """Read a model's GGUF file, each part of it once."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with gguf_files_read_once():
        return AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            attn_implementation="eager",
        )


@pytest.fixture(scope="session")
def assert_greedy(smollm2_oracle: PreTrainedModel) -> TokenChecker:
    """Check that an output is what greedy decoding with transformers gives.

    One forward pass over prompt and output: when every output token is the argmax after its predecessors then,
    by induction, the output is the greedy one. The beginning of an output that was checked needs none.
    """
    import torch

    checked: dict[tuple[int, ...], list[int]] = {}

    def check(prompt_token_ids: list[int], output_token_ids: list[int]) -> None:
        assert output_token_ids
        known = checked.get(tuple(prompt_token_ids), [])
        if output_token_ids == known[: len(output_token_ids)]:
            return
        ids = torch.tensor([prompt_token_ids + output_token_ids])
        with torch.inference_mode():
            logits = smollm2_oracle(ids).logits[0]
        expected = logits[len(prompt_token_ids) - 1 : -1].argmax(-1).tolist()
        assert output_token_ids == expected
        checked[tuple(prompt_token_ids)] = list(output_token_ids)

    return check
