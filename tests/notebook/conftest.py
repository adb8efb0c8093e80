"""Real kernels and real engines; whatever a test starts is gone afterwards."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium import browser
from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("notebook_support")

from notebook_support.bare import BarePages
from notebook_support.desk import Desk, OpenLab
from notebook_support.kernel import Kernel, SharedKernel
from notebook_support.lab import jupyter_lab
from notebook_support.leaks import end_engines, wait_until_clean
from notebook_support.warm_provisioner import cold_kernels, warm_kernels

StartKernel = Callable[[], Kernel]

PATIENT = """\
from nbengine.magics import engine
from nbengine.magics.generation import readiness, waits
engine.STATUS_SECONDS = readiness.PATIENCE = waits.PATIENCE = 60.0
"""
"""On a machine that does other things, an engine core that has nothing to do may take a second to say so."""
WITHOUT_SPARE = f"""\
{PATIENT}get_config().NBEngine.spare_engine = False
import os
if "JPY_SESSION_NAME" in os.environ:
    from nbengine.magics.generation import view
    view.UPDATE_SECONDS = 0.2
"""
"""An answer that streams in a page of JupyterLab is drawn five times a second instead of 25: each time JupyterLab computes
the styles of its whole page again, a third of a processor's time. Kernels without a page draw as people's do."""

SERVER_LOG = pytest.StashKey[Path]()


@pytest.fixture(autouse=True)
def server_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print what JupyterLab's server says during a test: the report of one that fails shows it."""
    path = request.config.stash.get(SERVER_LOG, None)
    before = 0 if path is None else path.stat().st_size
    yield
    path = request.config.stash.get(SERVER_LOG, None)
    if path is not None:
        print(path.read_bytes()[before:].decode(errors="replace"))


@pytest.fixture(scope="session")
def notebook_environment(private_runtime_dir: Path) -> Iterator[dict[str, str]]:
    """Environment of the kernels: directories of their own, and the tests' executor on the path.

    They start no spare engines, which import torch: most engines here write the alphabet and need none, and a
    kernel that attaches to an engine starts none. `with_spare_engines` is for who wants them. They are forks of a process
    that has imported what they need (`notebook_support/warm_kernels.py`), and their engines are copies of another.
    """
    with tempfile.TemporaryDirectory(prefix="nbk-") as directory:
        configuration_of(Path(directory)).parent.mkdir(parents=True)
        configuration_of(Path(directory)).write_text(WITHOUT_SPARE)
        own = {
            "IPYTHONDIR": f"{directory}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{directory}/jupyter",
            "NBENGINE_RUNTIME_DIR": f"{directory}/engines",
            "XDG_RUNTIME_DIR": directory,
            "PYTHONPATH": os.pathsep.join(
                [
                    str(Path(__file__).parent),
                    # Copies of engines are made as in the tests of processes.
                    str(Path(__file__).parents[1] / "process"),
                    *filter(None, [os.environ.get("PYTHONPATH")]),
                ]
            ),
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in own.items():
                patch.setenv(name, value)
            # Beside the directory, in which engines may leave nothing.
            with (
                tempfile.TemporaryDirectory(prefix="nbw-") as beside,
                warm_kernels(Path(beside), dict(os.environ)) as variables,
            ):
                for name, value in variables.items():
                    patch.setenv(name, value)
                yield dict(os.environ)
                end_engines()


@pytest.fixture
def with_spare_engines(notebook_environment: dict[str, str]) -> Iterator[None]:
    """Kernels that start during the test are configured as those of people are, apart from their patience; they are no
    forks, and their engines no copies."""
    configuration = configuration_of(directory_of(notebook_environment))
    configuration.write_text(PATIENT)
    with cold_kernels(notebook_environment):
        yield
    configuration.write_text(WITHOUT_SPARE)


@pytest.fixture
def start_kernel(notebook_environment: dict[str, str]) -> Iterator[StartKernel]:
    """Start kernels; they and all engines end with the test, and nothing may be left of them."""
    kernels: list[Kernel] = []

    def start() -> Kernel:
        kernels.append(Kernel(notebook_environment))
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.close()
    wait_until_clean(directory_of(notebook_environment))


@pytest.fixture(scope="module")
def clean_after_module(notebook_environment: dict[str, str]) -> Iterator[None]:
    """Check that nothing is left of the engines that a module's fixtures start."""
    yield
    wait_until_clean(directory_of(notebook_environment))


@pytest.fixture(scope="session")
def shared_kernel(notebook_environment: dict[str, str]) -> Iterator[SharedKernel]:
    """One kernel for all modules that want one, which it serves in turn."""
    shared = SharedKernel(notebook_environment)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def kernel(shared_kernel: SharedKernel, clean_after_module: None) -> Iterator[Kernel]:
    """One kernel for the tests of a module, which neither end nor restart it and leave it without an engine."""
    yield shared_kernel.take()
    shared_kernel.give_back()


@pytest.fixture
def clean_afterwards(notebook_environment: dict[str, str]) -> Iterator[None]:
    """Check that nothing is left of the engines that the test starts."""
    yield
    wait_until_clean(directory_of(notebook_environment))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests; pages that a test opens in it, it closes."""
    with browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="session")
def bare_pages(chromium: Browser) -> Iterator[BarePages]:
    """Pages without a notebook."""
    pages = BarePages(chromium)
    yield pages
    pages.close()


@pytest.fixture(scope="session")
def desk(
    request: pytest.FixtureRequest,
    chromium: Browser,
    notebook_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Desk]:
    """One JupyterLab, in one page, for all tests; who opens a notebook on it clears it afterwards."""
    directory = tmp_path_factory.mktemp("lab")
    request.config.stash[SERVER_LOG] = directory / "server.log"
    with jupyter_lab(directory, notebook_environment) as address:
        desk = Desk(chromium, address, directory)
        yield desk
        desk.close()


@pytest.fixture
def open_lab(desk: Desk, clean_afterwards: None) -> Iterator[OpenLab]:
    """Open a notebook of code cells in JupyterLab; it and its kernel end with the test."""
    yield desk.open
    desk.clear()


def directory_of(environment: dict[str, str]) -> Path:
    """The directory of everything that kernels and engines write."""
    return Path(environment["XDG_RUNTIME_DIR"])


def configuration_of(directory: Path) -> Path:
    """The file with which IPython is configured, in the kernels and in a terminal."""
    return directory / "ipython" / "profile_default" / "ipython_config.py"
