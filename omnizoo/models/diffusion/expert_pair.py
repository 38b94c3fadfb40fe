"""Two transformers that share the noise levels: one denoises the high ones, the other the low ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omnizoo.models.diffusion.split import SharedTokens, sharing

EXPERTS = ("transformer", "transformer_2")  # components of the pipeline: high and low noise


class ExpertPair(nn.Module):
    """The transformers of a pipeline with `boundary_ratio`, as one model."""

    def __init__(self, first: nn.Module, second: nn.Module, boundary: float) -> None:
        super().__init__()
        self.transformer = first
        self.transformer_2 = second
        self.boundary = boundary  # samples with at least this share of noise belong to `transformer`

    @property
    def config(self) -> Any:
        """The config of the first transformer. Both have the same inputs."""
        return self.transformer.config

    def forward(
        self, inputs: Mapping[str, dict[str, Any]], shared: Mapping[str, SharedTokens | None]
    ) -> dict[str, torch.Tensor]:
        """Run both experts, each on its inputs. Returns their outputs, keyed by name."""
        outputs = {}
        for name in EXPERTS:
            expert = self.get_submodule(name)
            with sharing(expert, shared[name]):
                outputs[name] = expert(**inputs[name], return_dict=False)[0]
        return outputs


def save_denoiser_config(model: Any, out: Path) -> None:
    """Write the config.json of a transformer to the folder `out`, or of the first transformer of a pair."""
    transformer: Any = model.transformer if isinstance(model, ExpertPair) else model
    fields = dict(transformer.config) | {"_class_name": type(transformer).__name__.removeprefix("FSDP")}
    (out / "config.json").write_text(json.dumps(fields, indent=2, default=str) + "\n")
