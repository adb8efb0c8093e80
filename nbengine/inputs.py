"""The forms that a prompt can take, under the name from which scripts import them."""

from __future__ import annotations

from nbengine.frontend.requests.input_processor import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
