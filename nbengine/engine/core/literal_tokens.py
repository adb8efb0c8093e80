"""A tokenizer for constraints in which the text of a special token is text.

The grammar library cuts forced text into the tokenizer's own tokens. A choice "<|im_start|>" would become the
special token of that name, which no text constraint allows, and the request would end there. So special
tokens get names for the library that no text has; their ids stay.
"""

from __future__ import annotations

import json
from typing import Any

_HIDDEN = "\ufdd0{}\ufdd1"
"""A name between two noncharacters of Unicode."""


def with_hidden_special_tokens(description: str) -> str:
    """Return the text of a tokenizer.json in which no text spells a special token.

    Raises:
        ValueError: the text is no JSON.
    """
    tokenizer: dict[str, Any] = json.loads(description)
    names = {
        token["content"]: _HIDDEN.format(token["content"])
        for token in tokenizer.get("added_tokens") or ()
        if token["special"] or _looks_special(token["content"])
    }
    for token in tokenizer.get("added_tokens") or ():
        token["content"] = names.get(token["content"], token["content"])
    model = tokenizer["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    # It only adds special tokens around a text, and knows them by their names.
    tokenizer["post_processor"] = None
    return json.dumps(tokenizer, ensure_ascii=False)


def _looks_special(text: str) -> bool:
    """Return whether the library takes an added token for a special one by its name."""
    return text.startswith("<") and text.endswith(">")
