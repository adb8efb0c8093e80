"""Truncated, altered and mismatching weight files: a `ModelLoadError` that names the file, or a correct load."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import read_header
from nbengine.models.checkpoints.gguf_config import hf_config
from nbengine.models.checkpoints.loader import check_checkpoint, load_decoder
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.registry import decoder_config
from nbengine.runtime.progress import Reporter

TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


def fill(config: DecoderConfig, path: Path) -> DecoderForCausalLM:
    cpu, report = torch.device("cpu"), Reporter(None, "load")
    return load_decoder(config, (path,), dtype=torch.float32, device=cpu, max_positions=64, report=report)


def load_gguf(path: Path) -> DecoderForCausalLM:
    return fill(decoder_config(hf_config(read_header(path))), path)


@pytest.fixture
def gguf_file(tmp_path: Path, random_model: Any, write_gguf: Any, gguf_variant: Any) -> Path:
    variant = gguf_variant(arch="llama", permute=True, vocabulary=40)
    path: Path = write_gguf(tmp_path / "model.gguf", random_model("Llama", **TINY), variant)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path, random_model: Any) -> Path:
    random_model("Llama", **TINY).save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def load_checkpoint(directory: Path) -> DecoderForCausalLM:
    config = decoder_config(json.loads((directory / "config.json").read_text()))
    return fill(config, directory / "model.safetensors")


@pytest.mark.parametrize("model_impl", ["nbengine", "transformers"])
def test_two_matrices_are_not_taken_for_one(
    model_impl: str, tmp_path: Path, random_model: Any, load: Any
) -> None:
    random_model("Llama", **TINY).save_pretrained(tmp_path)
    tied = {"tie_word_embeddings": True}
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight is another matrix than model\.embed_tokens"):
        load(tmp_path, model_impl=model_impl, hf_overrides=tied)
    path = tmp_path / "model.safetensors"
    config = decoder_config({**json.loads((tmp_path / "config.json").read_text()), **tied})
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight is another matrix"):
        check_checkpoint(config, (path,), torch.float32)
    weights = load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path)
    assert load(tmp_path, model_impl=model_impl, hf_overrides=tied).config.tie_word_embeddings


def refusal_or_none(load: Callable[[], object], path: Path) -> str | None:
    """The message of the refusal, which names the file; any other exception passes through."""
    try:
        load()
    except ModelLoadError as error:
        return str(error)
    return None


def test_a_gguf_cut_anywhere_is_refused(gguf_file: Path) -> None:
    content = gguf_file.read_bytes()
    header = read_header(gguf_file)
    first = min(tensor.offset for tensor in header.tensors.values())
    end = max(tensor.offset + tensor.num_bytes for tensor in header.tensors.values())
    for size in [*range(0, first, 7), *range(first, end, 997), end - 1]:
        gguf_file.write_bytes(content[:size])
        message = refusal_or_none(lambda: load_gguf(gguf_file), gguf_file)
        assert message is not None, f"{size} of {len(content)} bytes were accepted"
        assert str(gguf_file) in message


def test_altered_header_bytes_of_a_gguf_are_refused_or_harmless(gguf_file: Path) -> None:
    content = gguf_file.read_bytes()
    size = min(tensor.offset for tensor in read_header(gguf_file).tensors.values())
    chooser = random.Random(0)
    refused = 0
    for _ in range(400):
        altered = bytearray(content)
        altered[chooser.randrange(size)] = chooser.choice((0x00, 0x01, 0x7F, 0x80, 0xFF))
        gguf_file.write_bytes(altered)
        refused += refusal_or_none(lambda: load_gguf(gguf_file), gguf_file) is not None
    assert refused > 100


HUGE = struct.pack("<Q", 2**62)
FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (lambda data: b"GGML" + data[4:], "not a GGUF file"),
    "version": (lambda data: data[:4] + struct.pack("<I", 7) + data[8:], "GGUF version 7"),
    "byte order": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big-endian"),
    "tensor count": (lambda data: data[:8] + HUGE + data[16:], "tensors cannot fit"),
    "metadata count": (lambda data: data[:16] + HUGE + data[24:], "metadata entries cannot fit"),
    "string length": (lambda data: data[:24] + HUGE + data[32:], "truncated or corrupt: metadata key 0"),
    "empty": (lambda data: b"", "truncated"),
    "utf-8": (lambda data: data.replace(b"general.architecture", b"general.\xff\xfehitecture", 1), "UTF-8"),
    "key": (lambda data: data.replace(b"general.architecture", b"general.architectur\0", 1), "is missing"),
    "tensor name": (lambda data: data.replace(b"blk.0.attn_q", b"blk.0.attn_k", 1), "appears twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_refusal_of_a_gguf_says_what_is_wrong(fault: str, gguf_file: Path) -> None:
    alter, message = FAULTS[fault]
    gguf_file.write_bytes(alter(gguf_file.read_bytes()))
    with pytest.raises(ModelLoadError, match=message) as refusal:
        load_gguf(gguf_file)
    assert str(gguf_file) in str(refusal.value)


def test_a_tensor_that_claims_anothers_place_is_refused(gguf_file: Path) -> None:
    content = bytearray(gguf_file.read_bytes())
    place = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8 + 4
    content[place : place + 8] = bytes(8)
    gguf_file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"output_norm.weight.*offset 0"):
        load_gguf(gguf_file)


def test_a_safetensors_file_cut_anywhere_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    for size in [*range(0, 2000, 37), *range(2000, len(content), 499), len(content) - 1]:
        path.write_bytes(content[:size])
        message = refusal_or_none(lambda: load_checkpoint(checkpoint), path)
        assert message is not None, f"{size} of {len(content)} bytes were accepted"
        assert str(path) in message


def test_altered_header_bytes_of_a_safetensors_file_are_refused_or_harmless(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    size = 8 + struct.unpack_from("<Q", content)[0]
    chooser = random.Random(0)
    refused = 0
    for _ in range(400):
        altered = bytearray(content)
        altered[chooser.randrange(size)] = chooser.choice(b'0129"{}[],:a\x00\xff')
        path.write_bytes(altered)
        refused += refusal_or_none(lambda: load_checkpoint(checkpoint), path) is not None
    assert refused > 300


def with_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


NORM = "model.norm.weight"
MISMATCHES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda tensors: tensors.pop(NORM), f"lacks {NORM}"),
    "shape": (lambda tensors: tensors.update({NORM: torch.ones(31)}), r"norm.weight has the shape \[31\]"),
    "unused": (lambda tensors: tensors.update({"extra.bias": torch.ones(3)}), "does not use: extra.bias"),
    "integers": (
        lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int32)}),
        "I32; quantised weights",
    ),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_tensors_that_do_not_fit_the_configuration_are_named(mismatch: str, checkpoint: Path) -> None:
    change, message = MISMATCHES[mismatch]
    with_tensors(checkpoint / "model.safetensors", change)
    with pytest.raises(ModelLoadError, match=message):
        load_checkpoint(checkpoint)


def test_frequencies_that_old_checkpoints_store_are_ignored(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    with_tensors(checkpoint / "model.safetensors", lambda tensors: tensors.update({name: torch.ones(8)}))
    assert load_checkpoint(checkpoint).config.num_layers == 1


CONFIG_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["OwnForCausalLM"]}, "OwnForCausalLM is not supported.* These run: .*Llama"),
    ({"architectures": None}, "config.json has no architectures"),
    ({"hidden_size": "many"}, "hidden_size must be a positive integer, got 'many'"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"vocab_size": 2**60}, "sizes are impossible"),
    ({"vocab_size": 2**40}, r"embed_tokens.weight has the shape \[40, 32\]"),
    ({"num_key_value_heads": 3}, "must be a multiple"),
    ({"head_dim": 15}, "head_dim must be even"),
    ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported"),
    ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "RoPE scaling 'spiral' is not supported"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a positive number, got None"),
    ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
]


@pytest.mark.parametrize(("entries", "message"), CONFIG_FAULTS, ids=[message for _, message in CONFIG_FAULTS])
def test_a_wrong_configuration_is_refused_with_its_entry(
    entries: dict[str, Any], message: str, checkpoint: Path
) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    with pytest.raises(ModelLoadError, match=message):
        load_checkpoint(checkpoint)


def test_a_rope_table_beyond_reason_asks_for_max_model_len(checkpoint: Path) -> None:
    config = decoder_config(
        {**json.loads((checkpoint / "config.json").read_text()), "max_position_embeddings": 10**9}
    )
    with pytest.raises(ModelLoadError, match="set max_model_len"):
        DecoderForCausalLM(config, dtype=torch.float32, device=torch.device("cpu"))
    assert fill(config, checkpoint / "model.safetensors").config.max_position_embeddings == 10**9
