"""The extension that `%load_ext nbengine` loads and `%unload_ext nbengine` unloads."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

from IPython.core.extensions import ExtensionManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics

from nbengine.frontend.text.tokenizer import import_early
from nbengine.magics.chat import ChatMagics
from nbengine.magics.completion import Completion
from nbengine.magics.config import NBEngine
from nbengine.magics.conversations.conversation import Conversations
from nbengine.magics.dashboard import DashboardMagics
from nbengine.magics.engine import EngineMagics, farewell
from nbengine.magics.generate import GenerateMagics
from nbengine.magics.kept_prompts.shelf import Shelf
from nbengine.magics.kept_runs.recording import Recorder
from nbengine.magics.playground.magic import PlaygroundMagics
from nbengine.magics.prompts import PromptsMagics
from nbengine.magics.runs import RunsMagics
from nbengine.magics.session import Backend, NotebookSession
from nbengine.magics.tools.mcp_servers import McpServers
from nbengine.magics.transform import AwaitGenerate, keep_prompts

_MOMENT = 0.2
"""Seconds after which a cell's end has been told."""


@dataclass
class Extension:
    """The parts that loading has added to a shell, and their removal."""

    shell: InteractiveShell
    session: NotebookSession
    config: NBEngine
    engine: EngineMagics
    generate: GenerateMagics
    transform: AwaitGenerate
    completion: Completion
    servers: McpServers
    recorder: Recorder
    others: tuple[Magics, ...] = ()
    """Magics that have to be registered and need nothing else of the extension."""

    loaded: ClassVar[dict[InteractiveShell, Extension]] = {}

    def install(self) -> None:
        """Define the magics."""
        shell = self.shell
        for magics in self._magics:
            shell.register_magics(magics)
        _configurables(shell).append(self.config)
        self.completion.install()
        # Ours comes first, since IPython's own transformers would edit a prompt.
        shell.input_transformers_cleanup.insert(0, keep_prompts)
        shell.input_transformers_post.append(self.transform)
        shell.events.register("pre_execute", self.transform.on_pre_execute)
        shell.events.register("post_execute", self.transform.on_post_execute)

    def uninstall(self) -> None:
        """Remove the magics."""
        shell = self.shell
        self.completion.uninstall()
        shell.events.unregister("pre_execute", self.transform.on_pre_execute)
        shell.events.unregister("post_execute", self.transform.on_post_execute)
        shell.input_transformers_post.remove(self.transform)
        shell.input_transformers_cleanup.remove(keep_prompts)
        for magics in self._magics:
            for kind, names in magics.magics.items():
                for name in names:
                    shell.magics_manager.magics[kind].pop(name, None)
            shell.magics_manager.registry.pop(type(magics).__name__, None)
        # Registering magics has added them there, too.
        configurables = _configurables(shell)
        configurables[:] = [item for item in configurables if item not in (self.config, *self._magics)]

    @property
    def _magics(self) -> tuple[Magics, ...]:
        return (self.engine, self.generate, *self.others)

    def leave(self) -> str:
        """End background generations and MCP servers, write the runs that wait, detach from every engine, and return what
        becomes of the engines."""
        self.session.ongoing.cancel_background()
        self.session.ongoing.stops.close()
        self.servers.close()
        self.recorder.close()
        self.session.backend.drop_spare()
        return farewell(self.session.close())


def load(shell: InteractiveShell, backend: Backend | None = None) -> None:
    """Define the magics in `shell`, once; `backend` makes and finds the engines."""
    if shell in Extension.loaded:
        return
    config = NBEngine(parent=shell)
    session = NotebookSession(shell, backend)
    conversations, servers = Conversations(), McpServers()
    recorder = Recorder(shell, config)
    engine = EngineMagics(shell, session, config, recorder)
    shelf = Shelf(config)
    generate = GenerateMagics(shell, session, config, recorder, shelf.find)
    runs = RunsMagics(shell, session, config, recorder, generate)
    extension = Extension(
        shell=shell,
        session=session,
        config=config,
        engine=engine,
        generate=generate,
        transform=AwaitGenerate(shell),
        completion=Completion(shell, session, conversations, engine, shelf),
        servers=servers,
        recorder=recorder,
        others=(
            ChatMagics(shell, session, config, conversations, servers, recorder, shelf.find),
            DashboardMagics(shell, session, config),
            runs,
            PromptsMagics(shell, shelf, recorder),
            PlaygroundMagics(shell, session, config, recorder, shelf),
        ),
    )
    extension.install()
    Extension.loaded[shell] = extension
    if config.spare_engine:
        session.backend.keep_spare()
        _import_between_cells()


def unload(shell: InteractiveShell) -> None:
    """Remove the magics from `shell` and detach from its engines, which go on for their `keep_alive`.

    `%reload_ext` unloads and loads at once: it changes nothing, so that engines, conversations and settings stay.
    """
    if _is_reloading():
        return
    extension = Extension.loaded.pop(shell, None)
    if extension is None:
        return
    extension.uninstall()
    message = extension.leave()
    if message:
        print(message)


def _is_reloading() -> bool:
    """Return whether IPython unloads the extension to load it at once; it says so in no other way."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is ExtensionManager.reload_extension.__code__:
            return True
        frame = frame.f_back
    return False


def _import_between_cells() -> None:
    """Have this kernel import what the first engine needs once the cell has ended; a terminal has no such moment."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop().call_later(_MOMENT, import_early)


def _configurables(shell: InteractiveShell) -> list[Any]:
    """Return the list of what `%config` knows, which IPython declares as a list of shells."""
    return shell.configurables
