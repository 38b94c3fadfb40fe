"""Tiny pipeline folders of diffusers: random weights, 2 layers and 4 heads, built without the network in seconds.

    folder = make_pipeline("wan", tmp_path / "wan")
    DiffusionPipeline.from_pretrained(folder)

Classes, schedulers and conventions are those of the published models. Only sizes are small.
"""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from fixtures import TEXT
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer, T5TokenizerFast

TEXT_WIDTH = 32
CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|pad|>"]
# Words of the prompt templates of QwenImage and HunyuanVideo, so that a template has about as many tokens as published.
TEMPLATE_WORDS = """system user assistant Describe the image by detailing the color, shape, size, texture, quantity,
text, spatial relationships of the objects and background: Describe the video by detailing the following aspects:
1. The main content and theme of the video.2. 3. Actions, events, behaviors temporal relationships, physical movement
changes of the objects.4. background environment, light, style and atmosphere.5. camera angles, movements, and
transitions used in the video:"""

Maker = Callable[[], diffusers.DiffusionPipeline]


def make_pipeline(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the tiny pipeline `name` (a key of `PIPELINES`) to `folder`, with random weights from `seed`."""
    torch.manual_seed(seed)
    pipeline = PIPELINES[name]()
    # Constructors leave many weights at 0 or 1. Random values let a test notice when one is ignored.
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            perturb(component)
    pipeline.save_pretrained(folder)
    return folder


def perturb(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


# ---- tokenizers


def t5_tokenizer() -> T5TokenizerFast:
    """Return a tokenizer of characters and a few words."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *string.printable.strip(), "▁a", "▁the", "▁of", "▁is", "▁red", "▁cat"]
    vocab = [(piece, -float(i > 2) * (8 - len(piece))) for i, piece in enumerate(dict.fromkeys(pieces))]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, additional_special_tokens=[], model_max_length=512)


def clip_tokenizer() -> CLIPTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def _byte_level(special_tokens: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEMPLATE_WORDS.splitlines() * 4, *TEXT.splitlines()], trainer)
    return tokenizer


def qwen_tokenizer() -> Qwen2Tokenizer:
    trained = json.loads(_byte_level(CHAT_TOKENS).to_str())["model"]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        additional_special_tokens=CHAT_TOKENS[1:],
    )


def llama_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(LLAMA_TOKENS),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        pad_token="<|pad|>",
    )


# ---- text and image encoders


def t5_encoder() -> transformers.T5EncoderModel:
    sizes = {"d_model": TEXT_WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=128, **sizes)).eval()


def umt5_encoder() -> transformers.UMT5EncoderModel:
    sizes = {"d_model": TEXT_WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.UMT5EncoderModel(transformers.UMT5Config(vocab_size=128, **sizes)).eval()


def clip_text(projection: int | None = None) -> transformers.PreTrainedModel:
    """Return CLIP's text tower, with a projection head when its width is given."""
    config = transformers.CLIPTextConfig(
        vocab_size=514,
        hidden_size=TEXT_WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=projection or TEXT_WIDTH,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )
    cls = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return cls(config).eval()


def clip_vision() -> transformers.CLIPVisionModel:
    config = transformers.CLIPVisionConfig(
        hidden_size=TEXT_WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    return transformers.CLIPVisionModel(config).eval()


def qwen_vl() -> transformers.Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": 600,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
    }
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": TEXT_WIDTH}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def llama() -> transformers.LlamaModel:
    config = transformers.LlamaConfig(
        vocab_size=600,
        hidden_size=TEXT_WIDTH,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaModel(config).eval()


# ---- autoencoders. All of them halve the sides twice or more, so that small images have few tokens


def image_vae(**changes: Any) -> diffusers.AutoencoderKL:
    """Return a KL autoencoder with 4 pixels per side of a latent."""
    fields: dict[str, Any] = {
        "block_out_channels": [8, 8, 8],
        "norm_num_groups": 4,
        "latent_channels": 4,
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "sample_size": 32,
    }
    return diffusers.AutoencoderKL(**fields | changes).eval()


def _causal_vae(cls: Any) -> Any:
    statistics = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.5, 2.0, 1.0]}
    sizes = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return cls(**sizes, **statistics, temperal_downsample=[False, True, True]).eval()


def ltx_vae() -> diffusers.AutoencoderKLLTXVideo:
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8),
        down_block_types=("LTXVideoDownBlock3D",) * 3,
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=(1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False),
        decoder_spatio_temporal_scaling=(True, True, False),
        decoder_inject_noise=(False,) * 4,
        upsample_residual=(False,) * 3,
        upsample_factor=(1,) * 3,
        patch_size=2,
    )
    # The statistics are buffers: a published model stores them with its weights.
    vae.latents_mean.copy_(torch.linspace(-0.3, 0.3, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 1.5, 8))
    return vae.eval()


def hunyuan_vae() -> diffusers.AutoencoderKLHunyuanVideo:
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    return vae.eval()


def cogvideo_vae() -> diffusers.AutoencoderKLCogVideoX:
    vae = diffusers.AutoencoderKLCogVideoX(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        sample_height=32,
        sample_width=32,
    )
    return vae.eval()


# ---- schedulers with the settings of the published models


def dynamic_flow(max_shift: float) -> diffusers.FlowMatchEulerDiscreteScheduler:
    """Return the scheduler of Flux and QwenImage: the shift grows with the number of tokens."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=max_shift, base_image_seq_len=256, max_image_seq_len=4096
    )


def shifted_flow(shift: float) -> diffusers.FlowMatchEulerDiscreteScheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)


def unipc(shift: float) -> diffusers.UniPCMultistepScheduler:
    """Return the scheduler of Wan."""
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, num_train_timesteps=1000
    )


# ---- pipelines


def _wan_transformer(**changes: Any) -> diffusers.WanTransformer3DModel:
    fields: dict[str, Any] = {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 16,
        "ffn_dim": 64,
        "num_layers": 2,
    }
    return diffusers.WanTransformer3DModel(**fields | changes)


def wan() -> diffusers.WanPipeline:
    return diffusers.WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(),
        vae=_causal_vae(diffusers.AutoencoderKLWan),
        scheduler=unipc(3.0),
        transformer=_wan_transformer(),
    )


def wan_two_experts() -> diffusers.WanPipeline:
    """Return the text-to-video pair of Wan 2.2: one transformer per range of timesteps."""
    return diffusers.WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(),
        vae=_causal_vae(diffusers.AutoencoderKLWan),
        scheduler=unipc(3.0),
        transformer=_wan_transformer(),
        transformer_2=_wan_transformer(),
        boundary_ratio=0.875,
    )


def wan_i2v() -> diffusers.WanImageToVideoPipeline:
    # 4 noisy channels, 4 of the mask, 4 of the encoded first frame
    image = {"in_channels": 12, "image_dim": TEXT_WIDTH, "added_kv_proj_dim": 48}
    return diffusers.WanImageToVideoPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(),
        vae=_causal_vae(diffusers.AutoencoderKLWan),
        scheduler=unipc(3.0),
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        image_encoder=clip_vision(),
        transformer=_wan_transformer(**image),
    )


def flux() -> diffusers.FluxPipeline:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.FluxPipeline(
        scheduler=dynamic_flow(1.15),
        vae=image_vae(scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=clip_text(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(),
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
    )


def qwen_image() -> diffusers.QwenImagePipeline:
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.QwenImagePipeline(
        scheduler=dynamic_flow(0.9),
        vae=_causal_vae(diffusers.AutoencoderKLQwenImage),
        text_encoder=qwen_vl(),
        tokenizer=qwen_tokenizer(),
        transformer=transformer,
    )


def sd3() -> diffusers.StableDiffusion3Pipeline:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=16,
    )
    t5 = {"d_model": 2 * TEXT_WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=shifted_flow(3.0),
        vae=image_vae(scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=clip_text(TEXT_WIDTH),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text(TEXT_WIDTH),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=transformers.T5EncoderModel(transformers.T5Config(vocab_size=128, **t5)).eval(),
        tokenizer_3=t5_tokenizer(),
    )


def ltx() -> diffusers.LTXPipeline:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=TEXT_WIDTH,
    )
    return diffusers.LTXPipeline(
        scheduler=dynamic_flow(2.05),
        vae=ltx_vae(),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
    )


def hunyuan_video() -> diffusers.HunyuanVideoPipeline:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=12,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        rope_axes_dim=(4, 4, 4),
    )
    return diffusers.HunyuanVideoPipeline(
        text_encoder=llama(),
        tokenizer=llama_tokenizer(),
        transformer=transformer,
        vae=hunyuan_vae(),
        scheduler=shifted_flow(7.0),
        text_encoder_2=clip_text(),
        tokenizer_2=clip_tokenizer(),
    )


def cogvideox() -> diffusers.CogVideoXPipeline:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=TEXT_WIDTH,
        num_layers=2,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        use_rotary_positional_embeddings=True,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing", snr_shift_scale=1.0
    )
    return diffusers.CogVideoXPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(),
        vae=cogvideo_vae(),
        transformer=transformer,
        scheduler=scheduler,
    )


def pixart() -> diffusers.PixArtAlphaPipeline:
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=8,
        caption_channels=TEXT_WIDTH,
        use_additional_conditions=False,
    )
    return diffusers.PixArtAlphaPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(),
        vae=image_vae(),
        transformer=transformer,
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02),
    )


PIPELINES: dict[str, Maker] = {
    "wan": wan,
    "wan_two_experts": wan_two_experts,
    "wan_i2v": wan_i2v,
    "flux": flux,
    "qwen_image": qwen_image,
    "sd3": sd3,
    "ltx": ltx,
    "hunyuan_video": hunyuan_video,
    "cogvideox": cogvideox,
    "pixart": pixart,
}
