"""Tokenizers that have no tokenizer.json, held against what their vocabularies mean: SentencePiece's and
tiktoken's own rules, written down here without either library."""

from __future__ import annotations

import base64
import contextlib
import importlib
import io
import itertools
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

from nbengine.config import ModelConfig
from nbengine.errors import ModelLoadError
from nbengine.frontend.text.tokenizer import load_tokenizer, with_tokenizer
from nbengine.models.checkpoints import tokenizer_convert, tokenizer_prepare
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.checkpoints.tokenizer_prepare import prepared_tokenizer
from nbengine.runtime.progress import Reporter
from tests.support.thorough import amount

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
UNIGRAM, BPE = 1, 2
Piece = tuple[str, float, int]
WORDS = ["he", "▁t", "▁the", "ox", "▁f", "▁fox", "in", "ing", "er", "▁a"]
LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!é"]
PIECES: list[Piece] = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    ("\n\n", 0.0, USER_DEFINED),
    *((word, -float(rank), NORMAL) for rank, word in enumerate(WORDS)),
    *((letter, -100.0 - rank, NORMAL) for rank, letter in enumerate(LETTERS)),
]
TEXTS = ["the fox", "a foxing there", "é 🙂 東京", "no  two  spaces", "the\n\nfox", "."]
LLAMA = ({"model_type": "llama"}, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})
UNNAMED: tuple[dict[str, Any], dict[str, Any]] = ({}, {})


def write_model(
    directory: Path, kind: int, classes: tuple[dict[str, Any], dict[str, Any]], name: str = "tokenizer.model"
) -> Path:
    """Write what a directory without tokenizer.json has."""
    model = sentencepiece.ModelProto()
    for piece, score, kind_of_piece in PIECES:
        model.pieces.add(piece=piece, score=score, type=kind_of_piece)
    spec = model.trainer_spec
    spec.model_type, spec.byte_fallback, spec.unk_id, spec.bos_id, spec.eos_id = kind, True, 0, 1, 2
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(model.SerializeToString())
    for file, content in zip(("config.json", "tokenizer_config.json"), classes, strict=True):
        if content:
            (directory / file).write_text(json.dumps(content))
    return directory


def converted(directory: Path, **settings: Any) -> PreTrainedTokenizerFast:
    return load_tokenizer(with_tokenizer(ModelConfig(directory=str(directory), **settings)))


@contextlib.contextmanager
def converting_here() -> Iterator[None]:
    """Convert here, where transformers is imported already; that a process of its own does it is tested below."""

    # A function of the package has the module's name.
    convert_slow_tokenizer = importlib.import_module("transformers.convert_slow_tokenizer")

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        places = (
            (convert_slow_tokenizer, "SentencePieceExtractor"),
            (convert_slow_tokenizer.SpmConverter, "build_tokenizer_from_spm_proto"),
            (convert_slow_tokenizer.TikTokenConverter, "load_tiktoken_bpe"),
        )
        message = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(message):
            for owner, name in places:
                # A conversion changes it for its process.
                patch.setattr(owner, name, vars(owner).get(name))
            status = tokenizer_convert.main(command[3:])
        return subprocess.CompletedProcess(command, status, "", message.getvalue())

    with pytest.MonkeyPatch.context() as outer:
        substitute = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL)
        outer.setattr(tokenizer_prepare, "subprocess", substitute)
        yield


@pytest.fixture
def without_a_process() -> Iterator[None]:
    """See `converting_here`."""
    with converting_here():
        yield


def merged(text: str) -> list[str]:
    """Encode by SentencePiece's rule for BPE: merge the pair with the best score, the first of equals, until
    there is none; what has no piece is its bytes."""
    scores = {piece: score for piece, score, kind in PIECES if kind == NORMAL}
    parts = list(text)
    while True:
        pairs = [
            (scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return list(in_bytes(parts, scores))


def likeliest(text: str) -> list[str]:
    """Encode by SentencePiece's rule for Unigram: the division with the best sum of scores."""
    scores = {piece: score for piece, score, kind in PIECES if kind == NORMAL}
    unknown = min(scores.values()) - 10.0
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        options = []
        for start in range(end):
            piece = text[start:end]
            if piece in scores or len(piece) == 1:
                score, parts = best[start]
                options.append((score + scores.get(piece, unknown), [*parts, piece]))
        best.append(max(options, key=lambda option: option[0]))
    return list(in_bytes(best[-1][1], scores))


def in_bytes(parts: list[str], scores: dict[str, float]) -> Iterator[str]:
    for part in parts:
        if part in scores:
            yield part
        else:
            yield from (f"<0x{byte:02X}>" for byte in part.encode())


def expected(text: str, kind: int) -> list[str]:
    """Encode a text whose user-defined pieces stand by themselves, behind the space that a text begins with."""
    rule = merged if kind == BPE else likeliest
    tokens: list[str] = []
    for number, part in enumerate(("▁" + text.replace(" ", "▁")).split("\n\n")):
        tokens += ["\n\n"] * (number > 0) + rule(part)
    return tokens


@pytest.mark.parametrize(
    ("kind", "classes"),
    [(BPE, LLAMA), (BPE, UNNAMED), (UNIGRAM, UNNAMED)],
    ids=["Llama's class", "BPE without a class", "Unigram without a class"],
)
@pytest.mark.usefixtures("without_a_process")
def test_a_sentencepiece_model_encodes_and_decodes_as_its_own_rules_say(
    kind: int, classes: tuple[dict[str, Any], dict[str, Any]], private_cache: Path, tmp_path: Path
) -> None:
    tokenizer = converted(write_model(tmp_path / "m", kind, classes))
    rng = random.Random(5)
    texts = TEXTS + [
        "".join(rng.choices("the foxing🙂é .", k=rng.randint(1, 20))).lstrip() or "a" for _ in range(60)
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == expected(text, kind), text
        assert ids == [[piece for piece, _, _ in PIECES].index(token) for token in expected(text, kind)]
        # A user-defined piece is text, and not left out with the special tokens.
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 2)
    assert tokenizer.decode([1, *ids, 2], skip_special_tokens=True) == tokenizer.decode(ids)
    if classes is LLAMA:
        assert tokenizer.encode("a")[0] == 1


def test_a_converted_tokenizer_is_kept_until_its_files_change(
    private_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(tmp_path / "m", BPE, LLAMA)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    reports: list[str] = []

    def prepared() -> Path:
        return prepared_tokenizer(
            directory, "auto", Reporter(lambda progress: reports.append(progress.detail), "fetch")
        )

    first = prepared()
    assert first.is_relative_to(private_cache)
    config = ModelConfig(directory=str(directory), tokenizer_directory=str(first))
    assert load_tokenizer(config).chat_template == "of a processor"
    assert reports == ["converting the tokenizer in m"]
    with monkeypatch.context() as nothing_runs:
        nothing_runs.setattr(tokenizer_prepare.subprocess, "run", None)
        assert prepared() == first
    (directory / "tokenizer_config.json").write_text(json.dumps({**LLAMA[1], "eos_token": "<s>"}))
    with converting_here():
        assert prepared() != first
    assert list(directory.glob("tokenizer.json")) == []


@pytest.mark.usefixtures("without_a_process")
def test_a_file_of_tiktokens_becomes_a_byte_level_tokenizer(private_cache: Path, tmp_path: Path) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the", b"ox", b" fox"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (tmp_path / "some.tiktoken").write_text("\n".join(lines) + "\n")
    tokenizer = converted(tmp_path)
    ids = tokenizer.encode("the ox, the fox 🙂", add_special_tokens=False)
    assert [tokens[token] for token in ids[:6]] == [b"the", b" ", b"ox", b",", b" the", b" fox"]
    assert b"".join(tokens[token] for token in ids) == "the ox, the fox 🙂".encode()
    assert tokenizer.decode(ids) == "the ox, the fox 🙂"


@pytest.mark.usefixtures("without_a_process")
def test_slow_takes_the_vocabulary_and_fast_takes_the_file(private_cache: Path, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", BPE, UNNAMED)
    fast = Path(resolve_model(ModelConfig("random-tiny")).directory)
    with pytest.raises(
        ModelLoadError, match=r"tokenizer_mode='fast' asks for; 'auto' makes it of tokenizer\.model"
    ):
        converted(directory, tokenizer_mode="fast")
    (directory / "tokenizer.json").write_text((fast / "tokenizer.json").read_text())
    ids = {
        mode: converted(directory, tokenizer_mode=mode).encode("the fox") for mode in ("auto", "fast", "slow")
    }
    assert ids["auto"] == ids["fast"] != ids["slow"]
    assert ids["slow"] == [[piece for piece, _, _ in PIECES].index(token) for token in ("▁the", "▁fox")]
    (directory / "tokenizer.model").unlink()
    with pytest.raises(
        ModelLoadError, match=r"no vocabulary for tokenizer_mode='slow'.*'auto' takes its tokenizer"
    ):
        converted(directory, tokenizer_mode="slow")


def test_what_cannot_be_converted_is_named_with_its_directory_and_what_would_do(
    private_cache: Path, tmp_path: Path
) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    (nothing / "model.safetensors").touch()
    with pytest.raises(ModelLoadError) as raised:
        converted(nothing)
    assert str(raised.value).startswith(f"{nothing} has no tokenizer.json; name another tokenizer")
    assert "spiece.model" in str(raised.value)
    assert str(raised.value).endswith("The directory has model.safetensors")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.model").write_bytes(b"\xff\xfe no model")
    with amount(converting_here, thorough=contextlib.nullcontext)(), pytest.raises(ModelLoadError) as raised:
        converted(broken)
    message = str(raised.value)
    assert message.startswith(
        f"{broken} has no tokenizer.json, and none can be made of its tokenizer.model: "
    )
    assert "neither a SentencePiece model nor a file of tiktoken's" in message
    assert message.endswith(
        "Name another tokenizer with the argument tokenizer, or put a tokenizer.json there"
    )
    assert not list((private_cache / "prepared").glob("broken-*"))


@pytest.mark.usefixtures("without_a_process")
def test_the_templates_beside_a_vocabulary_come_along(private_cache: Path, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", BPE, LLAMA)
    (directory / "chat_template.jinja").write_text("default")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert converted(directory).chat_template == {"default": "default", "tool_use": "with tools"}
