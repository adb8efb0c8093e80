"""The text of a special token in a choice, a constant or a regular expression is text, which ordinary tokens write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from nbengine.config import ModelConfig
from nbengine.engine.core import structured
from nbengine.engine.core.literal_tokens import with_hidden_special_tokens
from nbengine.engine.core.structured import GuidanceGrammar, StructuredOutputManager
from nbengine.sampling_params import SamplingParams, StructuredOutputsParams
from tests.unit.engine.structured.grammar_rig import InThisProcess

SPECIAL, ADDED, PLAIN = "<|im_start|>", "<filename>", "\n\n"
LABELS = (SPECIAL, ADDED, f"see {ADDED}:", f"{SPECIAL}{SPECIAL}", "<|im_")


@pytest.fixture(scope="module")
def tokenizer_and_manager(
    model: ModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, StructuredOutputManager]:
    directory = tmp_path_factory.mktemp("model")
    source = Path(model.directory)
    for file in source.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    tokenizer.add_tokens([AddedToken(ADDED, special=False), AddedToken(PLAIN, special=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = ModelConfig(model.model, directory=str(directory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structured, "GrammarChecker", InThisProcess)
        return tokenizer, StructuredOutputManager(config, tokenizer.get_vocab_size(), max_num_seqs=1)


def written(
    tokenizer: Tokenizer, manager: StructuredOutputManager, **constraint: Any
) -> tuple[list[int], str]:
    """Follow the grammar by its first allowed token each; return the tokens and what they decode to."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), max_tokens=200)
    grammar = manager.compile(params)
    assert isinstance(grammar, GuidanceGrammar)
    ids: list[int] = []
    while not grammar.matcher.is_accepting():
        mask = manager.fill_bitmasks([grammar])[0].view(np.uint32)
        token = next(i for i in range(tokenizer.get_vocab_size()) if mask[i >> 5] >> (i & 31) & 1)
        assert grammar.accept_tokens([token]), grammar.error
        ids.append(token)
    return ids, tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("label", LABELS)
def test_the_answer_is_the_text_and_has_no_special_token(
    tokenizer_and_manager: tuple[Tokenizer, StructuredOutputManager], label: str
) -> None:
    tokenizer, manager = tokenizer_and_manager
    hidden = {tokenizer.token_to_id(SPECIAL), tokenizer.token_to_id(ADDED)}
    regex = "".join(f"[{c}]" for c in label)
    for constraint, wanted in (
        ({"choice": [label]}, label),
        ({"regex": regex}, label),
        ({"json": {"const": label}}, json.dumps(label)),
        ({"json": {"enum": [label]}, "disable_any_whitespace": True}, json.dumps(label)),
    ):
        ids, text = written(tokenizer, manager, **constraint)
        assert text == wanted
        assert not hidden & set(ids)


def test_a_grammar_can_still_name_special_tokens(
    tokenizer_and_manager: tuple[Tokenizer, StructuredOutputManager],
) -> None:
    tokenizer, manager = tokenizer_and_manager
    ids, text = written(tokenizer, manager, grammar=f'start: {SPECIAL} "a"')
    assert (ids[0], text) == (tokenizer.token_to_id(SPECIAL), f"{SPECIAL}a")


def test_ids_stay_and_added_tokens_that_are_text_keep_their_names(
    tokenizer_and_manager: tuple[Tokenizer, StructuredOutputManager],
) -> None:
    tokenizer, _ = tokenizer_and_manager
    hidden = Tokenizer.from_str(with_hidden_special_tokens(tokenizer.to_str()))
    assert hidden.get_vocab_size() == tokenizer.get_vocab_size()
    assert hidden.token_to_id(PLAIN) == tokenizer.token_to_id(PLAIN)
    assert (hidden.token_to_id(SPECIAL), hidden.token_to_id(ADDED)) == (None, None)
    names = {hidden.id_to_token(tokenizer.token_to_id(token)) for token in (SPECIAL, ADDED)}
    assert names == {f"\ufdd0{SPECIAL}\ufdd1", f"\ufdd0{ADDED}\ufdd1"}
