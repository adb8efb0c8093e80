"""The packed weights of a loaded model, and the file that later starts map them from."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nbengine.errors import NBEngineError
from nbengine.kernels.cpu.huge_pages import HUGE_PAGE
from nbengine.models.checkpoints.packed_file import PackedFile
from nbengine.models.checkpoints.packed_store import PackedStore
from nbengine.models.layers.regions import Region, huge_file_bytes
from nbengine.models.layers.weights import WeightSlot
from nbengine.version import __version__

logger = logging.getLogger(__name__)

_ABANDON_SECONDS = 2.0
THREAD_NAME = "packed weights"
"""The name of the thread that writes the file."""
_LOWEST_PRIORITY = 19
LAYOUT = 1
"""A part of the key, to be raised whenever the same files are packed into other bytes."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The files and the configuration of which a model is made."""

    paths: tuple[Path, ...]
    configuration: str

    def identity(self) -> tuple[object, ...]:
        """Return what changes when a file is written or replaced.

        Raises:
            OSError: a file is not there.
        """
        found: list[object] = [self.configuration]
        for path in self.paths:
            status = path.stat()
            found += (
                str(path.resolve()),
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
        return tuple(found)


class KeptWeights:
    """The regions of a model's weights, whose bytes come from a file in a store, or go there.

    `slots` are the model's. Nothing of it is called by two threads, but for what `keep` starts.
    """

    def __init__(
        self,
        store: PackedStore,
        origin: Origin,
        slots: Mapping[str, WeightSlot],
        regions: Sequence[Region],
    ) -> None:
        self._store = store
        self._origin = origin
        self._identity = origin.identity()
        self._regions = list(regions)
        self._name = re.sub(r"[^\w.]+", "-", origin.paths[0].stem)[:40]
        self._key = _key(self._identity, slots, regions)
        self._lock = threading.Lock()
        self._is_stopped = False
        self._thread: threading.Thread | None = None
        self._is_mapped = False

    @property
    def is_mapped(self) -> bool:
        """Return whether the regions' pages are those of a file."""
        return self._is_mapped

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the regions that `take` fills."""
        return sum(region.num_bytes for region in self._regions)

    def take(self, num_threads: int, on_bytes: Callable[[int], None]) -> bool:
        """Fill the regions from the file, and check what is in them; return False if the files of the model
        have to be read. `on_bytes` is told how much has been read."""
        with self._opened() as file:
            if file is None:
                return False
            try:
                is_whole = self._map(file, self._regions, num_threads, on_bytes)
                if is_whole and _are_small(self._regions):
                    for region, offset in zip(self._regions, file.offsets, strict=True):
                        region.read_file(file.descriptor, offset)
                elif is_whole:
                    self._is_mapped = True
            except OSError as error:
                for region in self._regions:
                    region.clear()
                self._store.remove(self._name, self._key, error)
                return False
            if not is_whole:
                for region in self._regions:
                    region.clear()
                return False
        how = "mapped" if self._is_mapped else "copied, as its pages are small,"
        logger.info("the packed weights were %s from the cache", how)
        self._regions.clear()
        return True

    def keep(self) -> None:
        """Write the file in the background, and have the regions' pages from it from then on."""
        self._thread = threading.Thread(target=self._keep, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the regions alone from now on, because they are about to change."""
        with self._lock:
            self._is_stopped = True

    def abandon(self) -> None:
        """Stop, and wait a moment until nothing is left of a file that was being written: the process ends."""
        self.stop()
        if self._thread is not None:
            self._thread.join(_ABANDON_SECONDS)

    def wait(self) -> None:
        """Wait until the file is written, or has failed to be."""
        if self._thread is not None:
            self._thread.join()

    def is_current(self, paths: tuple[Path, ...]) -> bool:
        """Return whether the regions have their pages from a file that holds what the files at `paths` do."""
        try:
            return self._is_mapped and Origin(paths, self._origin.configuration).identity() == self._identity
        except OSError:
            return False

    def _keep(self) -> None:
        # The start goes on, and requests come: on Linux each thread has a priority of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            if self._origin.identity() != self._identity:
                raise NBEngineError("the model's files have changed meanwhile")
            arrays = [region.tensor.numpy() for region in self._regions]
            source = ", ".join(map(str, self._origin.paths))
            self._store.write(self._name, self._key, source, arrays, self._reading)
            del arrays
            self._map_own()
        except _Stopped:
            logger.debug("packed weights are not kept: they are about to change")
        except (OSError, NBEngineError) as error:
            logger.info("packed weights are not kept: %s", error)
        finally:
            # Those of experts can be given up from now on.
            self._regions.clear()

    def _map_own(self) -> None:
        """Map what has been written, or another process has, in the place of the memory that holds the
        same."""
        with self._opened() as file:
            if file is None:
                return
            trial = [Region(region.num_bytes) for region in self._regions]
            if not self._map(file, trial, 1, _ignore) or _are_small(trial):
                return
            with self._reading():
                for region, offset in zip(self._regions, file.offsets, strict=True):
                    region.map_file(file.descriptor, offset)
                    region.take_pages(_ignore)
                self._is_mapped = True

    def _opened(self) -> contextlib.AbstractContextManager[PackedFile | None]:
        return self._store.opened(self._name, self._key, [region.num_bytes for region in self._regions])

    def _map(
        self,
        file: PackedFile,
        regions: Sequence[Region],
        num_threads: int,
        on_bytes: Callable[[int], None],
    ) -> bool:
        """Map the file; return whether its bytes are those that were written, and remove it otherwise."""
        for region, offset in zip(regions, file.offsets, strict=True):
            region.map_file(file.descriptor, offset)
            region.take_pages(on_bytes)
        is_whole = file.has([region.tensor.numpy() for region in regions], num_threads)
        if not is_whole:
            self._store.remove(self._name, self._key, NBEngineError("is damaged"))
        return is_whole

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            if self._is_stopped:
                raise _Stopped
            yield


class _Stopped(Exception):
    """The weights are about to change."""


def _ignore(num_bytes: int) -> None:
    del num_bytes


def _key(identity: tuple[object, ...], slots: Mapping[str, WeightSlot], regions: Sequence[Region]) -> str:
    """Name everything that the bytes of the regions depend on."""
    digest = hashlib.sha256()
    for part in (LAYOUT, __version__, torch.__version__, mmap.PAGESIZE, *identity):
        digest.update(f"{part}\0".encode())
    for name, slot in slots.items():
        address, tensor = slot.tensor.data_ptr(), slot.tensor
        place = next(
            (number, address - region.address)
            for number, region in enumerate(regions)
            if region.address <= address < region.address + max(1, region.num_bytes)
        )
        form = slot.form.name if slot.form else ""
        about = (slot.full_shape, slot.dim, slot.start, slot.rows, form, tensor.dtype, *tensor.shape)
        digest.update(f"{name}\0{place}\0{about}\0".encode())
    return digest.hexdigest()


def _are_small(regions: Sequence[Region]) -> bool:
    """Return whether most of the file that is mapped is not in huge pages, although there is room for them."""
    large = [region for region in regions if region.num_bytes >= HUGE_PAGE]
    # Not to ask the system is worth it: it looks at all of the process's memory for the answer.
    return bool(large) and huge_file_bytes(large) < sum(region.num_bytes for region in large) // 2
