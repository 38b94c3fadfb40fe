"""Write the data of the drawing demo: captioned drawings, and a pipeline of diffusers with an untrained transformer.

    python examples/draw/make_data.py runs/draw_data

The pipeline is a tiny `FluxPipeline` without anything pretrained. Its text encoders have random weights: they only have
to tell words apart. Its autoencoder copies pixels, so the transformer is trained on them. The script takes seconds and
is deterministic.
"""

import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image
from shapes import COLORS, NEW_SHAPE, SHAPES, SIZE, Drawing, captions, paint
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

DRAWINGS = 40  # per caption
WIDTH = 64  # of the text encoders
WORDS = ["<pad>", "</s>", "<unk>", "a", "top", "bottom", "left", "right", *COLORS, *SHAPES, NEW_SHAPE]
CONSTANT = 100.0  # much larger than all pixels


def split_captions(shapes: list[str]) -> tuple[list[Drawing], list[Drawing]]:
    """Return the captions of the shapes for training, and a twelfth of them that is held out."""
    drawings = captions(shapes)
    order = np.random.default_rng(0).permutation(len(drawings))
    held_out = set(order[: len(drawings) // 12].tolist())
    training = [drawing for i, drawing in enumerate(drawings) if i not in held_out]
    return training, [drawings[i] for i in sorted(held_out)]


def write_rows(file: Path, drawings: Iterable[Drawing], count: int, seed: int) -> None:
    """Write `count` drawings of each caption as rows with `prompt` and `image`."""
    rng = np.random.default_rng(seed)
    rows = [{"prompt": d.caption, "image": {"bytes": png(paint(d, rng))}} for _ in range(count) for d in drawings]
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    print(f"{file}: {len(rows):,} rows")


def png(image: Image.Image) -> bytes:
    """Encode an image as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", WORDS.index("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", model_max_length=8
    )


def copying_autoencoder() -> AutoencoderKL:
    """Return an autoencoder whose latents are the pixels, so nothing has to be pretrained.

    All residual branches are 0. Around the last norm and SiLU of encoder and decoder, each value x travels as the pair
    x and -x, because silu(x) - silu(-x) = x. A much larger constant pair keeps the scale of the norm almost constant.
    """
    autoencoder = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"],
        up_block_types=["UpDecoderBlock2D"],
        block_out_channels=[8],
        layers_per_block=1,
        latent_channels=3,
        norm_num_groups=1,
        sample_size=SIZE,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    for name, parameter in autoencoder.named_parameters():
        is_branch_output = "conv2" in name or "to_out" in name
        if is_branch_output or name.split(".")[1] in ("conv_in", "conv_out"):
            nn.init.zeros_(parameter)
    for part in (autoencoder.encoder, autoencoder.decoder):
        with torch.no_grad():
            for i in range(3):
                part.conv_in.weight[2 * i, i, 1, 1] = 1
                part.conv_in.weight[2 * i + 1, i, 1, 1] = -1
                part.conv_out.weight[i, 2 * i, 1, 1] = 1
                part.conv_out.weight[i, 2 * i + 1, 1, 1] = -1
            part.conv_in.bias[6] = CONSTANT
            part.conv_in.bias[7] = -CONSTANT
            part.conv_norm_out.weight.fill_(CONSTANT / 2)  # the standard deviation of the 8 channels
    nn.init.constant_(autoencoder.encoder.conv_out.bias[3:], -30.0)  # log variance: the latents are not random
    return autoencoder


def untrained_transformer() -> FluxTransformer2DModel:
    """Return a small transformer. Blocks start as the identity, because the outputs of modulations are 0."""
    transformer = FluxTransformer2DModel(
        in_channels=4 * 3,  # patches of 2 x 2 pixels
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=2,
        attention_head_dim=32,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    for name, parameter in transformer.named_parameters():
        if name.startswith(("proj_out", "norm_out")) or ("norm" in name and ".linear." in name):
            nn.init.zeros_(parameter)
    return transformer


def untrained_pipeline() -> FluxPipeline:
    """Return the pipeline."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 4}
    clip = CLIPTextConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        max_position_embeddings=8,
        bos_token_id=WORDS.index("a"),
        eos_token_id=WORDS.index("</s>"),
        pad_token_id=WORDS.index("<pad>"),
        **sizes,
    )
    t5 = T5Config(vocab_size=len(WORDS), d_model=WIDTH, d_kv=16, d_ff=WIDTH, num_layers=1, num_heads=4)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=copying_autoencoder(),
        text_encoder=CLIPTextModel(clip),
        tokenizer=tokenizer(),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=tokenizer(),
        transformer=untrained_transformer(),
    )


def main(folder: Path) -> None:
    training, held_out = split_captions(SHAPES)
    write_rows(folder / "train.parquet", training, DRAWINGS, seed=1)
    write_rows(folder / "held_out.parquet", held_out, 8, seed=2)
    ring_training, ring_held_out = split_captions([NEW_SHAPE])
    write_rows(folder / "ring_train.parquet", ring_training, DRAWINGS, seed=3)
    write_rows(folder / "ring_held_out.parquet", ring_held_out, 8, seed=4)
    untrained_pipeline().save_pretrained(folder / "pipeline")
    print(f"{folder / 'pipeline'}: FluxPipeline")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
