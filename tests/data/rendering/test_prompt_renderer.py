"""Rows of diffusion transformers: prompt and item, buckets of shapes, encoded latents, dropped prompts, bad rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from omnizoo.data.rendering.prompt_renderer import PromptRenderer
from omnizoo.data.row import BadRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.modalities.denoised import denoised_modalities
from omnizoo.modalities.media import BadMedia


class Geometry:
    """An autoencoder with 4 pixels per side of a latent and 2 frames per latent; patches of 1 x 2 x 2 latents."""

    def latent_shape(self, frames: int | None, height: int, width: int) -> tuple[int, ...]:
        return (4, (frames or 1) // 2 + 1, height // 4, width // 4)

    def normalized_shape(self, latent_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(latent_shape)

    def latent_tokens(self, latent_shape: tuple[int, ...]) -> int:
        return latent_shape[1] * latent_shape[2] // 2 * latent_shape[3] // 2

    def text_tokens(self, prompt: str) -> int:
        return 1 + len(prompt.split())


SHAPES = ["16x16", "16x32", "32x64", "16x16x5", "16x16x9"]


def renderer(shapes: list[str] = SHAPES, **options: Any) -> PromptRenderer:
    modalities = denoised_modalities(("image", "video"), Geometry(), shapes)
    return PromptRenderer(modalities, Geometry(), **{"pack_tokens": 100} | options)


def picture(width: int, height: int) -> Any:
    return np.full((height, width, 3), 128, np.uint8)


def render(row: dict[str, Any], key: tuple[int, int, int] = (0, 0, 0), folder: Path = Path(), **options: Any) -> Any:
    find = MediaFolder(folder, None).find
    (sample,) = renderer(**options).render_samples(row, key, find)
    return sample


@pytest.mark.parametrize(
    ("size", "shape"), [((20, 22), (4, 4)), ((60, 30), (4, 8)), ((130, 66), (8, 16)), ((5, 4), (4, 4))]
)
def test_item_gets_the_nearest_shape(size: tuple[int, int], shape: tuple[int, int]) -> None:
    sample = render({"prompt": "a red cat", "image": picture(*size)})
    assert sample.batch_shape == (4, 1, *shape, 4)
    assert len(sample) == shape[0] * shape[1] // 4 + 4
    pixels = sample.items[0].port
    assert str(pixels) == "image/decoder"


def test_clip_gets_the_most_frames_that_it_fills() -> None:
    frames = [picture(16, 16)] * 8
    assert render({"prompt": "", "video": frames}).batch_shape == (4, 3, 4, 4, 1)
    assert render({"prompt": "", "video": [*frames, *frames]}).batch_shape == (4, 5, 4, 4, 1)
    with pytest.raises(BadRow, match="the clip has 4 frames, fewer than each shape"):
        render({"prompt": "", "video": frames[:4]})


def test_item_is_resized_to_cover_its_shape_and_cropped(tmp_path: Path) -> None:
    wide = np.zeros((16, 64, 3), np.uint8)
    wide[:, 24:40] = 200  # the middle, which a centered crop keeps
    Image.fromarray(wide).save(tmp_path / "wide.png")
    row = {"prompt": "x", "image": "wide.png"}
    item = render(row, folder=tmp_path, shapes=["16x16"]).items[0]
    decoder = renderer(["16x16"]).modalities["image"].decoder
    assert decoder is not None
    pixels = decoder.prepare(item.media)["pixels"]
    assert pixels.shape == (3, 16, 16)
    assert (pixels == 200).all()


def test_messages_equal_prompt_and_item() -> None:
    item = picture(16, 16)
    messages = [
        {"role": "user", "content": "a cat"},
        {"role": "assistant", "content": [{"type": "image", "image": item}]},
    ]
    from_messages = render({"messages": messages})
    assert from_messages.batch_shape == render({"prompt": "a cat", "image": item}).batch_shape
    assert bytes(from_messages.items[0].notes["prompt"].tolist()) == b"a cat"
    assert from_messages.row_schema == "messages"


def test_prompts_are_dropped_by_row_and_epoch_only() -> None:
    row = {"prompt": "one two three", "image": picture(16, 16)}

    def dropped(seed: int, epoch: int) -> list[bool]:
        keys = [(0, epoch, number) for number in range(200)]
        return [render(row, key, text_dropout=0.3, seed=seed).batch_shape[-1] == 1 for key in keys]

    assert dropped(0, 0) == dropped(0, 0)
    assert dropped(0, 0) != dropped(0, 1)
    assert 0.2 < sum(dropped(0, 0)) / 200 < 0.4


def test_encoded_latents_keep_their_shape_and_text(tmp_path: Path) -> None:
    tensors = {"mean": torch.randn(4, 2, 4, 6), "std": torch.ones(4, 2, 4, 6), "text": torch.randn(7, 3)}
    save_file(tensors, tmp_path / "clip.safetensors")
    row = {"prompt": "a cat", "latents": "clip.safetensors"}
    sample = render(row, folder=tmp_path)
    assert sample.batch_shape == (4, 2, 4, 6, 7)
    decoder = renderer().modalities["latents"].decoder
    assert decoder is not None
    inputs = decoder.prepare(sample.items[0].media)
    assert all(torch.equal(inputs[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(BadRow, match="text_dropout needs the encoded empty prompt"):
        render(row, folder=tmp_path, text_dropout=0.999999)


def test_latents_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_file({"mean": torch.full((4, 1, 4, 4), torch.nan)}, tmp_path / "nan.safetensors")
    item = render({"prompt": "x", "latents": "nan.safetensors"}, folder=tmp_path).items[0]
    decoder = renderer().modalities["latents"].decoder
    assert decoder is not None
    with pytest.raises(BadMedia, match=r"nan\.safetensors: the tensor `mean` has values that are not finite"):
        decoder.prepare(item.media)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "expected one of `image`, `video`, `latents`"),
        ({"image": "a.png", "latents": "a", "prompt": "x"}, "the row has `image` and `latents`"),
        ({"image": picture(16, 16)}, "`prompt` is missing"),
        ({"image": picture(16, 16), "prompt": 3}, "`prompt` is int"),
        ({"image": picture(16, 16), "prompt": "x", "mask": 1}, "`mask` is not used"),
        ({"image": "missing.png", "prompt": "x"}, r"missing\.png does not exist"),
        ({"image": {"bytes": b"x", "crop": 3}, "prompt": "x"}, "crop"),
        ({"image": picture(64, 32), "prompt": "word " * 100}, "more than data.pack_tokens"),
        ({"latents": "rows.txt", "prompt": "x"}, "not a safetensors file"),
        ({"messages": [{"role": "user", "content": "x"}]}, "one of the user and one of the assistant"),
    ],
)
def test_bad_row_has_one_clear_reason(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("text")
    with pytest.raises(BadRow, match=message) as caught:
        render(row, folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_media_file_without_shapes_is_refused() -> None:
    with pytest.raises(BadRow, match=r"^data\.shapes"):
        render({"prompt": "x", "image": picture(16, 16)}, shapes=[])
