"""FLOPs of diffusion transformers: the polynomial against torch's count at other sizes, and a published size."""

import inspect
from typing import Any

import diffusers
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from omnizoo.config.sections.model import ModelSection
from omnizoo.models.build import build_model
from omnizoo.models.diffusion.denoiser import latent_tokens
from omnizoo.models.diffusion.flops import denoiser_flops, sample_flops

SMALL_FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "pooled_projection_dim": 8,
    "axes_dims_rope": [4, 6, 6],
}
# The defaults of the class are the sizes of the 14B model, except for the width of the text.
LARGE_WAN = {"_class_name": "WanTransformer3DModel", "text_dim": 4096}


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(getattr(diffusers, config["_class_name"]).__init__).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty} | config


def test_flops_of_training_equal_torch_count_of_forward_times_three() -> None:
    config = with_defaults(SMALL_FLUX)
    model = build_model(ModelSection(config=config), "fp32")
    height, width, text_tokens = 6, 7, 33
    with FlopCounterMode(display=False) as counter:
        model(
            hidden_states=torch.zeros(1, height * width, 16, device="meta"),
            encoder_hidden_states=torch.zeros(1, text_tokens, 8, device="meta"),
            pooled_projections=torch.zeros(1, 8, device="meta"),
            timestep=torch.zeros(1, device="meta"),
            img_ids=torch.zeros(height * width, 3, device="meta"),
            txt_ids=torch.zeros(text_tokens, 3, device="meta"),
        )
    flops = sample_flops(model, (4, 2 * height, 2 * width), text_tokens)
    assert flops == pytest.approx(3 * counter.get_total_flops(), rel=1e-12)


def test_flops_of_14b_text_to_video_at_720p_equal_the_published_count() -> None:
    config = with_defaults(LARGE_WAN)
    tokens = latent_tokens(config, (16, 21, 90, 160))
    linear, attention = denoiser_flops(config).forward(tokens, 512)
    assert tokens == 75_600
    assert linear / 1e15 == pytest.approx(1.810, abs=5e-4)
    assert attention / 1e15 == pytest.approx(4.714, abs=5e-4)
