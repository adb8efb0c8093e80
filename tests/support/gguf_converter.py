"""A writer of GGUF files as llama.cpp's converter makes them of a checkpoint's directory; it shares no code with the
reader.

It follows conversion/*.py of llama.cpp: which metadata each class writes, and what it does to each tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor

from tests.support import gguf_further, gguf_llama4

F32 = GGMLQuantizationType.F32
VOCABULARY = 260
"""The tokens of the files: three special ones, the bytes, and one merge."""
ARCHS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral3",
    "Llama4ForCausalLM": "llama4",
    "Qwen2ForCausalLM": "qwen2",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "OlmoForCausalLM": "olmo",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "BambaForCausalLM": "granitehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "SmolLM3ForCausalLM": "smollm3",
    "Exaone4ForCausalLM": "exaone4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "SeedOssForCausalLM": "seed_oss",
    "GlmForCausalLM": "chatglm",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "Mamba2ForCausalLM": "mamba2",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}
_PERMUTED = ("llama", "mistral3", "olmo", "granite", "granitemoe", "granitehybrid", "smollm3")
_LINEAR = ("qwen3next", "qwen35", "qwen35moe")


class Converter:
    """The work of the converter on one checkpoint."""

    def __init__(self, directory: Path, kind: GGMLQuantizationType) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        # The configuration of Nemotron-H does not repeat the number of its blocks.
        self.config.setdefault("num_hidden_layers", len(self.config.get("layers_block_type", ())))
        self.tensors = load_file(directory / "model.safetensors")
        self.kind = kind
        self.arch = ARCHS[self.config["architectures"][0]]
        if self.arch == "granitehybrid" and "mamba" not in self._types():
            self.arch = "granitemoe" if self.config["num_local_experts"] else "granite"
        if self.arch == "nemotron_h" and "moe" in self.config["layers_block_type"]:
            self.arch = "nemotron_h_moe"
        archs = {name: member for member, name in gguf.MODEL_ARCH_NAMES.items()}
        self.table = gguf.get_tensor_name_map(archs[self.arch], self.config["num_hidden_layers"])

    def _types(self) -> list[str]:
        if "attn_layer_indices" in self.config:
            attention, count = self.config["attn_layer_indices"], self.config["num_hidden_layers"]
            return ["attention" if layer in attention else "mamba" for layer in range(count)]
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        return [names.get(each, each) for each in self.config["layer_types"]]

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary embedding of layers that see everything."""
        stated: dict[str, Any] = self.config.get("rope_parameters", {})
        full: dict[str, Any] = stated.get("full_attention", stated)
        return full

    @property
    def head_dim(self) -> int:
        """The dimensions of a head."""
        config = self.config
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

    def write(self, path: Path, more: dict[str, Any] | None = None) -> Path:
        """Write the file; `more` is metadata that the class in question writes besides, or writes otherwise."""
        writer = GGUFWriter(str(path), self.arch)
        stated = {key.replace("{arch}", self.arch): value for key, value in self.metadata()}
        for name, value in {**stated, **(more or {})}.items():
            kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            if isinstance(value, list):
                writer.add_array(name, value)
            else:
                kinds.get(type(value), writer.add_float32)(name, value)
        _write_vocabulary(writer)
        written = set()
        for name, tensor in self.converted():
            assert name not in written, name
            written.add(name)
            kind = self.kind if self.is_quantised(name, tensor) else F32
            data = tensor.float().contiguous().numpy()
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def is_quantised(self, name: str, tensor: Tensor) -> bool:
        """Tell whether llama.cpp quantises a tensor: not vectors, norms, routers and convolutions."""
        kept = ("norm", "ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "ssm_a", "ssm_d", "rope_factors")
        block = gguf.GGML_QUANT_SIZES[self.kind][0]
        return tensor.dim() > 1 and tensor.shape[-1] % block == 0 and not any(part in name for part in kept)

    def metadata(self) -> Iterator[tuple[str, Any]]:
        """The metadata of TextModel.set_gguf_parameters, and of the classes that add to it or replace it."""
        config, arch = self.config, self.arch
        if arch == "mamba2":
            yield from self._mamba2()
            return
        yield "{arch}.block_count", config["num_hidden_layers"]
        yield "{arch}.context_length", config["max_position_embeddings"]
        yield "{arch}.embedding_length", config["hidden_size"]
        yield "{arch}.attention.head_count", config["num_attention_heads"]
        yield "{arch}.attention.head_count_kv", config["num_key_value_heads"]
        if config.get("intermediate_size") is not None:
            yield "{arch}.feed_forward_length", config["intermediate_size"]
        eps = config.get("rms_norm_eps", config.get("norm_eps", config.get("layer_norm_epsilon")))
        if arch == "olmo":
            yield "olmo.attention.layer_norm_epsilon", 1e-5
            if config["clip_qkv"] is not None:
                yield "olmo.attention.clamp_kqv", config["clip_qkv"]
        else:
            yield "{arch}.attention.layer_norm_rms_epsilon", eps
        if not arch.startswith("nemotron"):
            yield "{arch}.rope.freq_base", float(self.rope["rope_theta"])
        if arch not in ("granite", "granitemoe", "granitehybrid", "phi3", "chatglm") and config.get(
            "head_dim"
        ):
            yield "{arch}.attention.key_length", config["head_dim"]
            yield "{arch}.attention.value_length", config["head_dim"]
        yield from self._rotary()
        yield from self._windows()
        yield from self._experts()
        yield from self._scales()
        yield from self._recurrent()
        yield from gguf_further.metadata(arch, config)

    def _mamba2(self) -> Iterator[tuple[str, Any]]:
        """The metadata that its class writes in place of everything else."""
        config = self.config
        inner = config["expand"] * config["hidden_size"]
        yield "mamba2.context_length", 2**20
        yield "mamba2.embedding_length", config["hidden_size"]
        yield "mamba2.feed_forward_length", 0
        yield "mamba2.attention.head_count", 0
        yield "mamba2.block_count", config["num_hidden_layers"]
        yield "mamba2.ssm.conv_kernel", config["conv_kernel"]
        yield "mamba2.ssm.inner_size", inner
        yield "mamba2.ssm.state_size", config["state_size"]
        yield "mamba2.ssm.time_step_rank", inner // config["head_dim"]
        yield "mamba2.ssm.group_count", config["n_groups"]
        yield "mamba2.attention.layer_norm_rms_epsilon", config["layer_norm_epsilon"]

    def _rotary(self) -> Iterator[tuple[str, Any]]:
        config, rope, arch = self.config, self.rope, self.arch
        part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if arch in (*_PERMUTED, "llama4", "phi3", "glm4", "glm4moe", "chatglm", *_LINEAR):
            yield "{arch}.rope.dimension_count", int(self.head_dim * (1.0 if part is None else part))
        if arch == "phi3":
            original = rope.get("original_max_position_embeddings", 4096)
            yield "phi3.rope.scaling.original_context_length", original
            if "long_factor" in rope:
                scale = config["max_position_embeddings"] / original
                factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
                yield "phi3.rope.scaling.attn_factor", factor
            return
        if arch in ("qwen35", "qwen35moe"):
            yield "{arch}.rope.dimension_sections", [11, 11, 10, 0]
        kind = rope.get("rope_type")
        if kind in ("linear", "yarn"):
            yield "{arch}.rope.scaling.type", kind
            yield "{arch}.rope.scaling.factor", rope["factor"]
        if kind == "yarn":
            original = rope["original_max_position_embeddings"]
            yield "{arch}.rope.scaling.original_context_length", original
            for hf, key in (("attention_factor", "attn_factor"), ("beta_fast", "beta_fast")):
                if rope.get(hf) is not None:
                    yield f"{{arch}}.rope.scaling.yarn_{key}", rope[hf]
        local = config.get("rope_parameters", {}).get("sliding_attention", {}).get("rope_theta")
        if local is not None:
            yield "{arch}.rope.freq_base_swa", float(local)

    def _windows(self) -> Iterator[tuple[str, Any]]:
        config, window = self.config, self.config.get("sliding_window")
        if self.arch == "phi3":
            yield "phi3.attention.sliding_window", window or 0
        elif self.arch in ("gemma2", "gemma3") or (self.arch == "olmo2" and window):
            yield "{arch}.attention.sliding_window", window
        elif self.arch == "llama" and window:
            yield "llama.attention.sliding_window", window
        if self.arch == "olmo2" and window:
            pattern = [each == "sliding_attention" for each in config["layer_types"]]
            yield "olmo2.attention.sliding_window_pattern", pattern

    def _experts(self) -> Iterator[tuple[str, Any]]:
        config = self.config
        count = config.get("num_experts", config.get("num_local_experts"))
        if count is not None:
            yield "{arch}.expert_count", count
            yield "{arch}.expert_used_count", config.get("num_experts_per_tok", config.get("top_k_experts"))
        if config.get("moe_intermediate_size"):
            yield "{arch}.expert_feed_forward_length", config["moe_intermediate_size"]
        shared = config.get("shared_expert_intermediate_size", config.get("shared_intermediate_size"))
        if self.arch == "llama4":
            yield from gguf_llama4.metadata(config)
        if shared:
            yield "{arch}.expert_shared_feed_forward_length", shared

    def _scales(self) -> Iterator[tuple[str, Any]]:
        config = self.config
        if self.arch == "gemma2":
            yield "gemma2.attn_logit_softcapping", config["attn_logit_softcapping"]
        if self.arch in ("gemma2", "gemma3") and config["final_logit_softcapping"]:
            yield "{arch}.final_logit_softcapping", config["final_logit_softcapping"]
        if "attention_multiplier" in config:
            yield "{arch}.attention.scale", config["attention_multiplier"]
            yield "{arch}.embedding_scale", config["embedding_multiplier"]
            yield "{arch}.residual_scale", config["residual_multiplier"]
            yield "{arch}.logit_scale", config["logits_scaling"]

    def _recurrent(self) -> Iterator[tuple[str, Any]]:
        config = self.config
        if self.arch in _LINEAR:
            value_heads = config["linear_num_value_heads"]
            yield "{arch}.ssm.conv_kernel", config["linear_conv_kernel_dim"]
            yield "{arch}.ssm.state_size", config["linear_key_head_dim"]
            yield "{arch}.ssm.group_count", config["linear_num_key_heads"]
            yield "{arch}.ssm.time_step_rank", value_heads
            yield "{arch}.ssm.inner_size", config["linear_value_head_dim"] * value_heads
            yield "{arch}.full_attention_interval", config.get("full_attention_interval", 4)
        if self.arch == "granitehybrid":
            yield "{arch}.ssm.conv_kernel", config["mamba_d_conv"]
            yield "{arch}.ssm.state_size", config["mamba_d_state"]
            yield "{arch}.ssm.group_count", config["mamba_n_groups"]
            yield "{arch}.ssm.inner_size", config["mamba_expand"] * config["hidden_size"]
            yield "{arch}.ssm.time_step_rank", config["mamba_n_heads"]
            heads = [config["num_key_value_heads"] if each == "attention" else 0 for each in self._types()]
            yield "{arch}.attention.head_count_kv", heads
            has_rope = config["architectures"] == ["BambaForCausalLM"]
            yield "{arch}.rope.scaling.finetuned", has_rope
            if not has_rope:
                yield "{arch}.context_length", 2**20
        if self.config["architectures"] == ["GraniteMoeHybridForCausalLM"] and self.arch != "granitehybrid":
            yield "{arch}.rope.scaling.finetuned", True
            heads = [config["num_key_value_heads"]] * config["num_hidden_layers"]
            yield "{arch}.attention.head_count_kv", heads
        if self.arch in ("lfm2", "lfm2moe"):
            heads = [0 if each == "conv" else config["num_key_value_heads"] for each in config["layer_types"]]
            yield "{arch}.attention.head_count_kv", heads
            yield "{arch}.shortconv.l_cache", config["conv_L_cache"]
        if self.arch == "lfm2moe":
            yield "lfm2moe.leading_dense_block_count", config["num_dense_layers"]
            yield "lfm2moe.expert_gating_func", 2
        if self.arch == "lfm2":
            inner = next(name for name in self.tensors if name.endswith("feed_forward.w1.weight"))
            yield "lfm2.feed_forward_length", self.tensors[inner].shape[0]

    def converted(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the file."""
        long = self.rope.get("long_factor")
        if long:
            yield "rope_factors_long.weight", torch.tensor(long)
            yield "rope_factors_short.weight", torch.tensor(self.rope["short_factor"])
        if self.rope.get("rope_type") == "llama3":
            yield "rope_freqs.weight", gguf_llama4.frequency_factors(self.rope, self.head_dim)
        if self.arch == "gemma4":
            yield "rope_freqs.weight", torch.tensor(gguf_further.still_pairs(self.config))
        experts: dict[str, dict[int, Tensor]] = {}
        for name, tensor in self.tensors.items():
            name = name.replace(".feed_forward.experts.", ".mlp.experts.")
            if ".mixer.experts." in name:
                name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
            if name == "lm_head.weight" and self.config["tie_word_embeddings"]:
                continue
            before, is_expert, rest = name.partition(".mlp.experts.")
            if is_expert and rest.split(".")[0].isdigit():
                number, _, projection = rest.partition(".")
                experts.setdefault(f"{before}.mlp.experts.{projection}", {})[int(number)] = tensor
            else:
                yield from self.changed(name, tensor)
        for name, stacked in experts.items():
            for theirs, usual in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
                name = name.replace(f".{theirs}.", f".{usual}.")
            yield self.named(name), torch.stack([stacked[number] for number in sorted(stacked)])

    def named(self, name: str) -> str:
        """The name in the file."""
        found = self.table.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert found is not None, name
        return str(found)

    def changed(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Convert one tensor."""
        config, arch = self.config, self.arch
        layer = name.split(".")[2] if ".layers." in name else ""
        if arch in _PERMUTED and name.endswith(
            ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
        ):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if name.endswith(("block_sparse_moe.input_linear.weight", "shared_mlp.input_linear.weight")):
            kind = "exps" if "block_sparse_moe" in name else "shexp" if config["num_local_experts"] else ""
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
                yield f"blk.{layer}.ffn_{part}{'_' if kind else ''}{kind}.weight", half
            return
        if name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
            yield f"blk.{layer}.ffn_down.weight", tensor
            return
        if (
            arch in ("gemma", "gemma2", "gemma3")
            or (arch in _LINEAR and not name.endswith("linear_attn.norm.weight"))
        ) and name.endswith("norm.weight"):
            tensor = tensor + 1
        if arch == "llama4" and name.endswith(gguf_llama4.STACKED):
            yield from ((self.named(part), matrices) for part, matrices in gguf_llama4.turned(name, tensor))
            return
        if ".linear_attn." in name:
            yield from self._linear(name, tensor, layer)
            return
        if arch.startswith("nemotron") and not name.endswith(gguf_further.OF_STATES):
            yield self.named(gguf_further.nemotron_name(name)), tensor
            return
        if ".mamba." in name or ".mixer." in name:
            yield from self._mamba(name, tensor)
            return
        if "conv.conv.weight" in name:
            tensor = tensor.squeeze(1)
        name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
        name = gguf_further.gemma4_name(name) if arch == "gemma4" else name
        if name.endswith(".expert_bias"):
            name = f"{name}.bias"
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze(0)
        yield self.named(name), tensor

    def _linear(self, name: str, tensor: Tensor, layer: str) -> Iterator[tuple[str, Tensor]]:
        config = self.config
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        if name.endswith(".conv1d.weight"):
            tensor = tensor.squeeze()
        if self.arch != "qwen3next" and keys != values:
            tensor = self._tiled(name, tensor)
        if name.endswith(".A_log"):
            tensor = -tensor.exp()
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if "in_proj_qkvz" not in name:
            yield self.named(name), tensor
            return
        group = values // keys * value_dim
        heads = tensor.reshape(keys, -1, tensor.shape[1])
        query, key, value, gate = heads.split([key_dim, key_dim, group, group], dim=1)
        joined = torch.cat([part.reshape(-1, tensor.shape[1]) for part in (query, key, value)])
        yield f"blk.{layer}.attn_qkv.weight", joined
        yield f"blk.{layer}.attn_gate.weight", gate.reshape(-1, tensor.shape[1])

    def _tiled(self, name: str, tensor: Tensor) -> Tensor:
        """The value heads of each key head lie together; they are dealt out to the key heads by turns instead."""
        config = self.config
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        before = 2 * keys * config["linear_key_head_dim"]

        def dealt(part: Tensor) -> Tensor:
            by_head = part.reshape(keys, values // keys, -1, *part.shape[1:])
            return by_head.transpose(0, 1).reshape(part.shape)

        if ".in_proj_qkv." in name or ".conv1d." in name:
            return torch.cat((tensor[:before], dealt(tensor[before:])))
        if ".out_proj." in name:
            return dealt(tensor.t().contiguous()).t()
        return tensor if name.endswith(".norm.weight") else dealt(tensor)

    def _mamba(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if name.endswith(".conv1d.weight"):
            tensor = tensor.squeeze()
        elif name.endswith((".A_log", ".D")):
            tensor = tensor.reshape(-1, 1)
        elif name.endswith(".norm.weight"):
            tensor = tensor.reshape(self.config.get("mamba_n_groups", self.config.get("n_groups")), -1)
        if name.endswith(".A_log"):
            tensor = -tensor.exp()
        yield self.named(name.replace(".dt_bias", ".dt_proj.bias")), tensor


def convert(
    directory: Path, path: Path, kind: GGMLQuantizationType = F32, more: dict[str, Any] | None = None
) -> Path:
    """Write the checkpoint in a directory as a GGUF file, its matrices of the type `kind`; return the path."""
    return Converter(directory, kind).write(path, more)


def round_matrices(model: Any, kind: GGMLQuantizationType) -> None:
    """Give the matrices of a model of transformers the values that they have in files of this type."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for name, parameter in model.named_parameters():
        is_convolution = "conv1d" in name or "conv.conv" in name
        is_turned = model.config.model_type == "llama4_text" and name.endswith(gguf_llama4.STACKED)
        values = parameter.data.mT if is_turned else parameter.data
        if values.dim() > 1 and values.shape[-1] % block == 0 and not is_convolution:
            rounded = gguf.dequantize(gguf.quantize(values.contiguous().numpy(), kind), kind)
            values.copy_(torch.from_numpy(rounded))


def _write_vocabulary(writer: GGUFWriter) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<|endoftext|>", "<s>", "</s>", *alphabet, "he"])
    writer.add_token_types([3, 3, 3] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
