"""The prompts that a notebook can name: those of the store, and those that live in its kernel alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from nbengine.errors import NBEngineError
from nbengine.frontend.prompts.prompt import Prompt
from nbengine.frontend.prompts.store import Listed, PromptStore, missing
from nbengine.frontend.runs.place import store_path
from nbengine.magics.config import NBEngine


class Shelf:
    """The kept prompts of a notebook.

    While `NBEngine.keep_runs` is off, and while the store cannot be written, a prompt lives in this kernel, where it
    goes before the store's ones of its name.
    """

    def __init__(self, config: NBEngine) -> None:
        self._config = config
        self._here: dict[str, list[Prompt]] = {}
        """By name, the versions that live in this kernel; the current one comes last."""

    @property
    def store(self) -> PromptStore:
        """Return the store."""
        return PromptStore(store_path())

    def keep(self, prompt: Prompt) -> tuple[Prompt, str]:
        """Keep a prompt, and return it with its version and the reason for which it lives in this kernel alone.

        The reason is empty where it is in the store.
        """
        if not self._config.keep_runs:
            return self._keep_here(prompt), "NBEngine.keep_runs is off"
        try:
            (kept,) = self.store.keep([prompt])
        except NBEngineError as error:
            return self._keep_here(prompt), str(error)
        self._here.pop(prompt.name, None)
        return kept, ""

    def take_over(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Keep prompts that come from elsewhere, all of them or none.

        Raises:
            NBEngineError: the store cannot be written.
        """
        if not self._config.keep_runs:
            return [self._keep_here(prompt) for prompt in prompts]
        kept = self.store.keep(prompts)
        for prompt in kept:
            self._here.pop(prompt.name, None)
        return kept

    def find(self, name: str, version: int | None = None) -> Prompt:
        """Return a version of a prompt, the current one if none is given.

        Raises:
            InvalidArgumentError: there is none.
            NBEngineError: the store cannot be read.
        """
        here = self._here.get(name, [])
        for prompt in reversed(here):
            if version in (None, prompt.version):
                return prompt
        found = self.store.find(name, version)
        if found is None:
            raise missing(name, version, [each.prompt for each in self.select()])
        return found

    def select(self) -> list[Listed]:
        """Return all versions of all prompts, by name and version.

        Raises:
            NBEngineError: the store cannot be read.
        """
        taken = {prompt.reference for prompts in self._here.values() for prompt in prompts}
        stored = [
            replace(each, is_current=each.is_current and each.prompt.name not in self._here)
            for each in self.store.select()
            if each.prompt.reference not in taken
        ]
        here = [
            Listed(prompt, prompt is prompts[-1], is_kept=False)
            for prompts in self._here.values()
            for prompt in prompts
        ]
        return sorted([*stored, *here], key=lambda each: (each.prompt.name, each.prompt.version))

    def names(self) -> list[str]:
        """List the names, those of this kernel alone where the store cannot be read."""
        try:
            return sorted({each.prompt.name for each in self.select()})
        except NBEngineError:
            return sorted(self._here)

    def delete(self, name: str, version: int | None = None) -> int:
        """Delete a version of a prompt, all of them if none is given; return how many have gone.

        Raises:
            InvalidArgumentError: there is none.
            NBEngineError: the store cannot be written.
        """
        self.find(name, version)
        here = self._here.pop(name, [])
        left = [prompt for prompt in here if version not in (None, prompt.version)]
        if left:
            self._here[name] = left
        return len(here) - len(left) + self.store.delete(name, version)

    def _keep_here(self, prompt: Prompt) -> Prompt:
        here = self._here.setdefault(prompt.name, [])
        for known in [*here, *self._stored(prompt.name)]:
            if known.digest == prompt.digest:
                if known in here:
                    here.remove(known)
                here.append(known)
                return known
        latest = max((known.version for known in here), default=0)
        kept = replace(prompt, version=max(latest + 1, self._next_version(prompt.name)), time=time.time())
        here.append(kept)
        return kept

    def _stored(self, name: str) -> list[Prompt]:
        try:
            return [each.prompt for each in self.store.select() if each.prompt.name == name]
        except NBEngineError:
            return []

    def _next_version(self, name: str) -> int:
        try:
            return self.store.next_version(name)
        except NBEngineError:
            return 1
