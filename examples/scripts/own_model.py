"""Run a model of one's own: a decoder whose feed-forward blocks square what is positive, and have no gate.

python examples/scripts/own_model.py

A family says what a config.json means and builds the model. This one takes all of nbengine's decoder but for the
feed-forward block; quantised weights, tensor parallelism and the rest come with the layers it is built from.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from nbengine import LLM, SamplingParams, register_model
from nbengine.models.family import DecoderFamily

if TYPE_CHECKING:
    from nbengine.models.causal_model import CausalModel, DecoderOptions
    from nbengine.models.configs.decoder_config import DecoderConfig

ARCHITECTURE = "SquaredReluForCausalLM"
CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


class SquaredRelu(DecoderFamily):
    """The family: `defaults` and `variant` say what config.json means, `build` makes the model."""

    title = "decoders with squared ReLU"
    defaults: Mapping[str, Any] = {"rms_norm_eps": 1e-5}

    def build(self, config: DecoderConfig, **options: Unpack[DecoderOptions]) -> CausalModel:
        """Make the decoder; torch is imported here, in the process that computes."""
        from nbengine.models.families.decoder import DecoderForCausalLM
        from nbengine.models.layers.basic import Linear, MergedLinear
        from nbengine.models.layers.parallel_layers import MergedColumnParallelLinear, row_parallel_linear

        class FeedForward:
            """`down(relu(up(x)) ** 2)`; each tensor-parallel rank has a part of the inner features."""

            def __init__(self, place: Any, parallel: Any) -> None:
                inner = [("up_proj", config.intermediate_size)]
                self.up: MergedLinear = MergedColumnParallelLinear(
                    config.hidden_size, inner, layout=parallel.layout, bias=False, place=place
                )
                self.down: Linear = row_parallel_linear(
                    config.intermediate_size,
                    config.hidden_size,
                    parallel=parallel,
                    bias=False,
                    place=place.inside("down_proj"),
                )

            def __call__(self, x: Any) -> Any:
                return self.down(self.up(x).relu_().square_())

            def slots(self, prefix: str) -> Any:
                """Yield the places of the weights under the names that the files have."""
                yield from self.up.slots(prefix)
                yield from self.down.slots(f"{prefix}.down_proj")

        class Decoder(DecoderForCausalLM):
            def feed_forward(self, index: int, place: Any, parallel: Any) -> FeedForward:
                """Make the block of the layer with this number."""
                return FeedForward(place, parallel)

        return Decoder(config, **options)


def write_random_model(directory: Path) -> None:
    """Write a model with random weights, as somebody's training would, and the tokenizer of `random-tiny`."""
    import torch
    from safetensors.torch import save_file

    from nbengine.config import ModelConfig
    from nbengine.models.checkpoints.files import resolve_model

    model = SquaredRelu().build(
        SquaredRelu().config(CONFIG), dtype=torch.float32, device=torch.device("meta"), max_positions=1
    )
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.ones(slot.full_shape)
        if len(slot.full_shape) == 1
        else torch.randn(slot.full_shape, generator=generator) * slot.full_shape[-1] ** -0.5
        for name, slot in model.weight_slots().items()
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tiny = Path(resolve_model(ModelConfig("random-tiny")).directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, directory / name)


def main() -> None:
    """Register the family, and generate with it in an engine of its own."""
    # The engine is another process, which imports this file by its name.
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    register_model(ARCHITECTURE, "own_model:SquaredRelu")
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory))
        llm = LLM(model=directory)
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        print(f"{ARCHITECTURE} wrote {len(outputs[0].outputs[0].token_ids)} tokens of noise")


if __name__ == "__main__":
    main()
