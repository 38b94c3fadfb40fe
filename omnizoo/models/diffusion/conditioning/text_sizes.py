"""Count the tokens of encoded prompts without the weights of the text encoders.

The pipeline's own `encode_prompt` runs with its tokenizers. Its text encoders are replaced by stand-ins that return
zeros, whose shapes come from a forward pass on the meta device.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from omnizoo.models.diffusion.conditioning.components import load_component
from omnizoo.models.diffusion.conditioning.text import TextConditioner, text_components
from omnizoo.models.diffusion.pipeline_folder import Component, PipelineFolder

CPU = torch.device("cpu")


class TextSize(NamedTuple):
    """Size of an encoded prompt."""

    tokens: int  # length of `text`, with padding
    unmasked_tokens: int  # number of tokens that `text_mask` keeps


class TextSizes:
    """Counts the tokens of encoded prompts. Loader workers receive a copy, which loads its tokenizers when needed.

    Args:
        folder: The pipeline.
        max_text_tokens: Maximum number of text tokens; None for the default of the pipeline.
    """

    def __init__(self, folder: PipelineFolder, max_text_tokens: int | None = None) -> None:
        self.folder = folder
        self.max_text_tokens = max_text_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return TextSizes, (self.folder, self.max_text_tokens)

    @cached_property
    def _conditioner(self) -> TextConditioner:
        loaded: dict[str, Any] = {}
        for name in text_components(self.folder):
            component = self.folder.component(name)
            if component.library != "transformers":
                continue  # connectors do not change the number of tokens
            is_model = issubclass(component.load_class(), nn.Module)
            loaded[name] = WeightlessEncoder(component) if is_model else load_component(component, CPU)
        return TextConditioner(self.folder, CPU, max_text_tokens=self.max_text_tokens, loaded=loaded)

    def __call__(self, prompt: str) -> TextSize:
        """Return the size of an encoded prompt."""
        tensors = self._conditioner.encode(prompt)
        tokens = len(tensors["text"])
        mask = tensors.get("text_mask")
        return TextSize(tokens, tokens if mask is None else int(mask.sum()))


class WeightlessEncoder(nn.Module):
    """Stand-in for a text encoder that returns zeros of the same shapes.

    Args:
        component: The text encoder.
    """

    dtype = torch.float32
    device = CPU

    def __init__(self, component: Component) -> None:
        super().__init__()
        model_class = component.load_class()
        with torch.device("meta"):
            model = model_class(model_class.config_class.from_pretrained(component.folder))
        self.config = model.config
        self._skeleton = (model.eval(),)  # a tuple, because a submodule would be moved to the device of the pipeline
        self._outputs: dict[tuple[int, ...], Any] = {}  # by the shape of the token ids

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output for token ids `[1, tokens]`: zeros in the structure of the model's output."""
        shape = tuple(input_ids.shape)
        if shape not in self._outputs:
            # Without masks, which do not change shapes, and whose values some models read on the CPU.
            options = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)}
            output = self._skeleton[0](input_ids.to("meta"), **options)
            self._outputs[shape] = _zeros_like(output)
        return self._outputs[shape]


def _zeros_like(output: Any) -> Any:
    """Return the output of a model on the meta device with zeros instead of its tensors. They need no memory."""
    if isinstance(output, torch.Tensor):
        return torch.zeros((), dtype=output.dtype).expand(output.shape)
    if isinstance(output, Mapping):
        return type(output)(**{name: _zeros_like(value) for name, value in output.items()})
    if isinstance(output, tuple | list):
        return type(output)(map(_zeros_like, output))
    return output
