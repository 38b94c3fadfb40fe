"""Features of generated images and clips, computed by a frozen pretrained model.

Images are processed one at a time, so the features of an image do not depend on other images.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from omnizoo.config.errors import UserError, first_line
from omnizoo.modalities.files.decoding import optional

FRAMES = 8  # maximum number of evenly spaced frames to score in a clip


class FrozenTower:
    """A pretrained model of transformers with image features, such as CLIP, SigLIP or DINOv2.

    The model is loaded when it is first used.

    Args:
        path: Folder of the model, with its image processor and, for text features, its tokenizer.
        key: Name of the metric, for messages.
    """

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self.key = key
        if not Path(path).is_dir():
            raise UserError(f"{key}: path: {path!r} is not a folder. Download the model, and pass its folder.")

    def _load(self, auto_class: str) -> Any:
        import transformers

        try:
            return getattr(transformers, auto_class).from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.key}: path: cannot load {self.path}: {first_line(error)}") from error

    @cached_property
    def model(self) -> Any:
        """The model, in fp32 on the CPU."""
        model = self._load("AutoModel").float().eval().requires_grad_(False)
        if not hasattr(model, "get_image_features") and "pixel_values" not in _forward_arguments(model):
            raise UserError(f"{self.key}: path: {type(model).__name__} has no image features. Use a vision model.")
        return model

    @cached_property
    def processor(self) -> Any:
        """The image processor of the model."""
        return self._load("AutoImageProcessor")

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self._load("AutoTokenizer")

    @torch.no_grad()
    def image_features(self, file: Path) -> torch.Tensor:
        """Return the features `[frames, width]` of an image, or of evenly spaced frames of a clip."""
        features = []
        for frame in read_frames(file):
            inputs = self.processor(images=frame, return_tensors="pt")
            if hasattr(self.model, "get_image_features"):
                features.append(_pooled(self.model.get_image_features(pixel_values=inputs["pixel_values"])))
            else:
                features.append(_pooled(self.model(pixel_values=inputs["pixel_values"])))
        return torch.cat(features)

    @torch.no_grad()
    def text_features(self, text: str) -> torch.Tensor:
        """Return the features `[1, width]` of a text. Texts are cut to the length that the model accepts."""
        if not hasattr(self.model, "get_text_features"):
            raise UserError(f"{self.key}: path: {type(self.model).__name__} has no text features. Use a CLIP model.")
        length = self.model.config.text_config.max_position_embeddings
        inputs = self.tokenizer(text, truncation=True, max_length=length, padding="max_length", return_tensors="pt")
        return _pooled(self.model.get_text_features(**inputs))


def read_frames(file: Path) -> Sequence[Any]:
    """Return a generated image, or at most `FRAMES` evenly spaced frames of a generated clip, as PIL images."""
    if file.suffix != ".mp4":
        return [optional("PIL.Image").open(file).convert("RGB")]
    with optional("av").open(str(file)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    count = min(FRAMES, len(frames))
    return [frames[(2 * i + 1) * len(frames) // (2 * count)] for i in range(count)]


def _pooled(output: Any) -> torch.Tensor:
    """Return the features `[images, width]` in the output of a model."""
    if isinstance(output, torch.Tensor):
        return output
    pooled: torch.Tensor | None = getattr(output, "pooler_output", None)
    return output.last_hidden_state[:, 0] if pooled is None else pooled


def _forward_arguments(model: Any) -> Sequence[str]:
    """Return the names of the arguments of a model's forward pass."""
    import inspect

    return list(inspect.signature(model.forward).parameters)
