"""This module prepares long prompts beside the caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from nbengine.frontend.requests.input_processor import PromptType, prompt_text
from nbengine.frontend.requests.prompt_length import LONG_TEXT

T = TypeVar("T")


async def beside_loop(prompt: PromptType, prepare: Callable[[], T]) -> T:
    """Return what `prepare` makes of a prompt; for a long text it is called on another thread, while the loop
    goes on.

    `prepare` must have no effect: nobody waits for it when the caller is cancelled.
    """
    if len(prompt_text(prompt) or "") < LONG_TEXT:
        return prepare()
    return await asyncio.to_thread(prepare)
