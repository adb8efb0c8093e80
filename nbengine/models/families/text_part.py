"""The text of models that take images, too: their decoder is one of a model of text alone."""

from __future__ import annotations

from nbengine.models.family import DecoderFamily


class TextPart(DecoderFamily):
    """A family some of whose models have a decoder of the family beside parts for images, which are not loaded."""

    unused: tuple[str, ...] = (
        "vision_tower.",
        "multi_modal_projector.",
        "visual.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
        "model.visual.",
    )

    def our_name(self, name: str) -> str:
        """Models with images may have the text's tensors inside `language_model`, in two ways."""
        return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
