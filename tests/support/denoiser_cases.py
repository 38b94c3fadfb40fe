"""Tiny diffusion transformers, each with a batch and the call that its own pipeline makes, as an independent reference.

The calls are written with the pipelines' static functions where they have them, and never with a recipe.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from diffusers import CogVideoXPipeline, Flux2Pipeline, FluxPipeline, LTXPipeline, QwenImagePipeline
from pipelines import PIPELINES, TEXT_WIDTH, make_pipeline, perturb
from torch import nn

from omnizoo.models.diffusion.pipeline_folder import PipelineFolder, is_pipeline_folder

Call = Callable[[Any, "Batch"], torch.Tensor]  # (transformer, batch) -> prediction in the shape of the latents
NUM_SAMPLES = 4


@dataclass(frozen=True)
class Batch:
    noisy: torch.Tensor
    share: torch.Tensor
    condition: Mapping[str, torch.Tensor]
    target: torch.Tensor

    def part(self, samples: slice) -> "Batch":
        condition = {name: tensor[samples] for name, tensor in self.condition.items()}
        return Batch(self.noisy[samples], self.share[samples], condition, self.target[samples])


@dataclass(frozen=True)
class DenoiserCase:
    pipeline: str  # key of `pipelines.PIPELINES`
    latents: tuple[int, ...]  # shape of one sample
    call: Call
    conditions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # shapes besides guidance
    guidance: float | None = None
    layouts: tuple[str, ...] = ("uly2.ring2",)  # weights are sharded over all four ranks

    def batch(self, dtype: torch.dtype = torch.float32) -> Batch:
        """Return the samples of this case: the same on every rank."""
        generator = torch.Generator().manual_seed(len(self.pipeline))

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(NUM_SAMPLES, *shape, generator=generator, dtype=torch.float64).to(dtype)

        condition = {name: normal(*shape) for name, shape in self.conditions.items()}
        if self.guidance is not None:
            condition["guidance"] = torch.full((NUM_SAMPLES,), self.guidance, dtype=dtype)
        share = torch.tensor([0.125, 0.5, 0.75, 0.938], dtype=dtype)
        return Batch(normal(*self.latents), share, condition, normal(*self.latents))


def make_folder(name: str, folder: Path) -> Path:
    """Write a tiny pipeline, or the transformer of a family without one in `PIPELINES`."""
    if name in PIPELINES:
        return make_pipeline(name, folder)
    torch.manual_seed(0)
    transformer = TRANSFORMERS[name]()
    perturb(transformer)
    transformer.save_pretrained(folder)
    return folder


def flux2() -> Any:
    return diffusers.Flux2Transformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )


def z_image() -> Any:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )


def sana() -> Any:
    return diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=TEXT_WIDTH,
        sample_size=8,
    )


def sd3_dual() -> Any:
    """Return a transformer like that of Stable Diffusion 3.5: some blocks also attend among the latents alone."""
    return diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=TEXT_WIDTH,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


TRANSFORMERS = {"sd3_dual": sd3_dual, "flux2": flux2, "z_image": z_image, "sana": sana}


def reference_loss(transformers: Mapping[str, nn.Module], case: DenoiserCase, batch: Batch) -> torch.Tensor:
    """Return the mean squared error of a batch with plain diffusers, in one process."""
    model = transformers if len(transformers) > 1 else next(iter(transformers.values()))
    prediction = case.call(model, batch)
    return (prediction - batch.target).square().mean()


def plain_transformers(folder: Path) -> dict[str, nn.Module]:
    """Load the transformers of a pipeline folder with diffusers, in training mode."""
    loaded = {}
    if not is_pipeline_folder(folder):
        class_name = json.loads((folder / "config.json").read_text())["_class_name"]
        return {"transformer": getattr(diffusers, class_name).from_pretrained(folder).train()}
    for name, component in PipelineFolder.read(folder).denoisers.items():
        loaded[name] = component.load_class().from_pretrained(component.folder).train()
    return loaded


# ---- the calls of the pipelines


def call_wan(model: Any, batch: Batch) -> torch.Tensor:
    return model(batch.noisy, batch.share * 1000, batch.condition["text"], return_dict=False)[0]


def call_wan_pair(models: Any, batch: Batch) -> torch.Tensor:
    predictions = []
    for sample in range(NUM_SAMPLES):
        part = batch.part(slice(sample, sample + 1))
        is_high = float(part.share) * 1000 >= 0.875 * 1000
        predictions.append(call_wan(models["transformer" if is_high else "transformer_2"], part))
    return torch.cat(predictions)


def call_wan_i2v(model: Any, batch: Batch) -> torch.Tensor:
    latents = torch.cat([batch.noisy, batch.condition["reference_latents"]], 1)
    features = batch.condition["reference_features"]
    return model(latents, batch.share * 1000, batch.condition["text"], features, return_dict=False)[0]


def call_flux(model: Any, batch: Batch) -> torch.Tensor:
    num_samples, channels, height, width = batch.noisy.shape
    packed = FluxPipeline._pack_latents(batch.noisy, num_samples, channels, height, width)
    text = batch.condition["text"]
    out = model(
        hidden_states=packed,
        timestep=batch.share,
        guidance=batch.condition["guidance"],
        pooled_projections=batch.condition["pooled"],
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=FluxPipeline._prepare_latent_image_ids(num_samples, height // 2, width // 2, text.device, text.dtype),
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(out, height * 8, width * 8, 8)


def call_qwen_image(model: Any, batch: Batch) -> torch.Tensor:
    num_samples, channels, height, width = batch.noisy.shape
    packed = QwenImagePipeline._pack_latents(batch.noisy, num_samples, channels, height, width)
    out = model(
        hidden_states=packed,
        timestep=batch.share,
        encoder_hidden_states=batch.condition["text"],
        encoder_hidden_states_mask=torch.ones(batch.condition["text"].shape[:2]),
        img_shapes=[[(1, height // 2, width // 2)]] * num_samples,
        return_dict=False,
    )[0]
    return QwenImagePipeline._unpack_latents(out, height * 8, width * 8, 8)[:, :, 0]


def call_sd3(model: Any, batch: Batch) -> torch.Tensor:
    return model(
        hidden_states=batch.noisy,
        timestep=batch.share * 1000,
        encoder_hidden_states=batch.condition["text"],
        pooled_projections=batch.condition["pooled"],
        return_dict=False,
    )[0]


def call_hunyuan_video(model: Any, batch: Batch) -> torch.Tensor:
    text = batch.condition["text"]
    return model(
        hidden_states=batch.noisy,
        timestep=batch.share * 1000,
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        pooled_projections=batch.condition["pooled"],
        guidance=batch.condition["guidance"] * 1000,
        return_dict=False,
    )[0]


def call_ltx(model: Any, batch: Batch) -> torch.Tensor:
    frames, height, width = batch.noisy.shape[2:]
    text = batch.condition["text"]
    out = model(
        hidden_states=LTXPipeline._pack_latents(batch.noisy),
        timestep=batch.share * 1000,
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        num_frames=frames,
        height=height,
        width=width,
        rope_interpolation_scale=(4 / 25, 8, 8),  # the tiny autoencoder makes 4 frames and 8 pixels one latent
        return_dict=False,
    )[0]
    return LTXPipeline._unpack_latents(out, frames, height, width)


def call_cogvideox(model: Any, batch: Batch) -> torch.Tensor:
    num_frames, height, width = batch.noisy.shape[2:]
    pipeline = SimpleNamespace(transformer=model, vae_scale_factor_spatial=8)
    rotary = CogVideoXPipeline._prepare_rotary_positional_embeddings(
        pipeline, height * 8, width * 8, num_frames, torch.device("cpu")
    )
    out = model(
        hidden_states=batch.noisy.permute(0, 2, 1, 3, 4),
        encoder_hidden_states=batch.condition["text"],
        timestep=(batch.share * 1000).round().long(),
        image_rotary_emb=rotary,
        return_dict=False,
    )[0]
    return out.permute(0, 2, 1, 3, 4)


def call_pixart(model: Any, batch: Batch) -> torch.Tensor:
    text = batch.condition["text"]
    out = model(
        batch.noisy,
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        timestep=(batch.share * 1000).round().long(),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        return_dict=False,
    )[0]
    return out.chunk(2, 1)[0]


def call_flux2(model: Any, batch: Batch) -> torch.Tensor:
    text = batch.condition["text"]
    height, width = batch.noisy.shape[2:]
    out = model(
        hidden_states=Flux2Pipeline._pack_latents(batch.noisy),
        timestep=batch.share,
        guidance=batch.condition["guidance"],
        encoder_hidden_states=text,
        txt_ids=Flux2Pipeline._prepare_text_ids(text),
        img_ids=Flux2Pipeline._prepare_latent_ids(batch.noisy),
        return_dict=False,
    )[0]
    return out.transpose(1, 2).unflatten(2, (height, width))


def call_z_image(model: Any, batch: Batch) -> torch.Tensor:
    latents = list(batch.noisy.unsqueeze(2).unbind())
    out = model(latents, 1 - batch.share, list(batch.condition["text"].unbind()), return_dict=False)[0]
    return -torch.stack(out).squeeze(2)


def call_sana(model: Any, batch: Batch) -> torch.Tensor:
    text = batch.condition["text"]
    return model(
        batch.noisy,
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        timestep=batch.share * 1000,
        return_dict=False,
    )[0]


CLIP = (3, 6, 10)  # frames, height, width: 45 tokens
PICTURE = (6, 10)  # 15 tokens
CASES = {
    "wan": DenoiserCase("wan", (4, *CLIP), call_wan, {"text": (7, TEXT_WIDTH)}, layouts=("dp4", "uly2.ring2", "ring4")),
    "wan_two_experts": DenoiserCase(
        "wan_two_experts", (4, *CLIP), call_wan_pair, {"text": (7, TEXT_WIDTH)}, layouts=("dp2.uly2",)
    ),
    "wan_i2v": DenoiserCase(
        "wan_i2v",
        (4, *CLIP),
        call_wan_i2v,
        {"text": (512, TEXT_WIDTH), "reference_latents": (8, *CLIP), "reference_features": (257, TEXT_WIDTH)},
    ),
    "flux": DenoiserCase(
        "flux",
        (4, *PICTURE),
        call_flux,
        {"text": (7, TEXT_WIDTH), "pooled": (TEXT_WIDTH,)},
        guidance=3.5,
        layouts=("uly2.ring2", "rep2.dp2"),
    ),
    "qwen_image": DenoiserCase(
        "qwen_image",
        (4, *PICTURE),
        call_qwen_image,
        {"text": (7, TEXT_WIDTH)},
        layouts=("dp2.uly2",),
    ),
    "sd3": DenoiserCase("sd3", (4, *PICTURE), call_sd3, {"text": (7, 2 * TEXT_WIDTH), "pooled": (2 * TEXT_WIDTH,)}),
    "hunyuan_video": DenoiserCase(
        "hunyuan_video",
        (4, *CLIP),
        call_hunyuan_video,
        {"text": (3, TEXT_WIDTH), "pooled": (TEXT_WIDTH,)},
        guidance=6.0,
        layouts=("uly4",),
    ),
    "ltx": DenoiserCase("ltx", (8, *CLIP), call_ltx, {"text": (7, TEXT_WIDTH)}),
    "cogvideox": DenoiserCase("cogvideox", (4, *CLIP), call_cogvideox, {"text": (7, TEXT_WIDTH)}),
    "sd3_dual": DenoiserCase("sd3_dual", (4, *PICTURE), call_sd3, {"text": (7, TEXT_WIDTH), "pooled": (TEXT_WIDTH,)}),
    "flux2": DenoiserCase("flux2", (8, *PICTURE), call_flux2, {"text": (7, TEXT_WIDTH)}, guidance=4.0),
    "z_image": DenoiserCase("z_image", (4, *PICTURE), call_z_image, {"text": (7, TEXT_WIDTH)}),
    "sana": DenoiserCase("sana", (4, *PICTURE), call_sana, {"text": (7, TEXT_WIDTH)}, layouts=("dp4",)),
    "pixart": DenoiserCase("pixart", (4, *PICTURE), call_pixart, {"text": (7, TEXT_WIDTH)}),
}
