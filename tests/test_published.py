"""Published omni models through our path (own encoders' calls, routed rows, packs) against Hugging Face's own forward.

Here in one process; `omnizoo verify` takes it from there to other layouts.
"""

import json
import random
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from fixtures import make_tokenizer
from omni import make_media
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from omnizoo.assembly.entrance import read_modalities
from omnizoo.assembly.published import media_model
from omnizoo.assembly.shrink import Shrinking, shrink_config
from omnizoo.assembly.writer import load_writer
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Model
from omnizoo.data.rollouts import Rollout
from omnizoo.modalities.base import Item, Modality, Port, Sampling
from omnizoo.modalities.item import BadMedia, Media
from omnizoo.models import attention
from omnizoo.models.experts import use_dispatched
from omnizoo.models.hf_private import PACKED, conversion_mapping, language_model, load_files
from omnizoo.models.media_batch import Delivered, Features, MediaBatch, place
from omnizoo.ops.attention import packed_attention
from omnizoo.ops.precision import exact
from omnizoo.recipes import qwen_towers
from omnizoo.recipes.base import read_facts, recipe_of
from omnizoo.recipes.qwen_towers import Tower
from omnizoo.training.engine import Engine

FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker")
MARKS = {
    "<|vision_start|>": 1,
    "<|vision_end|>": 2,
    "<|image_pad|>": 3,
    "<|video_pad|>": 4,
    "<|audio_start|>": 5,
    "<|audio_pad|>": 6,
    "<|audio_end|>": 7,
}
DTYPE = {"fp32": torch.float32, "fp64": torch.float64}
SMALL = {"min_pixels": 32 * 32, "max_pixels": 6 * 32 * 32}
OPTIONS = {"image": SMALL, "video": SMALL | {"max_pixels": 40 * 32 * 32, "fps": 4.0}, "audio": {}}


def tiny_config(family: str) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {"depth": 3, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
    audio = {"encoder_layers": 2, "d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    audio |= {"output_dim": 32, "downsample_hidden_size": 4, "num_mel_bins": 32}
    ids = {f"{kind}_token_id": MARKS[f"<|{kind}_pad|>"] for kind in ("image", "video", "audio")}
    ids |= {"vision_start_token_id": 1, "vision_end_token_id": 2, "audio_start_token_id": 5}
    parts = {"text_config": text | (experts if "moe" in family else {}), "vision_config": vision}
    if family == "qwen3_omni_moe_thinker":
        parts["audio_config"] = audio
    else:
        ids = {key: value for key, value in ids.items() if "audio" not in key}
    return AutoConfig.for_model(family, **parts, **ids)


@cache
def tiny_model(family: str, precision: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(tiny_config(family)).to(DTYPE[precision])
    with torch.no_grad():
        for parameter in model.parameters():  # far enough from zero that every path matters
            parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    if "moe" in family:
        model.set_experts_implementation("eager")  # grouped matmuls have no float64
    return model.eval()


def ours(family: str, precision: str) -> tuple[PreTrainedModel, dict[str, Modality]]:
    """The model as `parallelize` leaves it on one rank, and its modalities on a copy without weights."""
    model = deepcopy(tiny_model(family, precision))
    language_model(model).set_attn_implementation(PACKED)
    if "moe" in family:
        use_dispatched(language_model(model))
    options = {name: {"encoder": {"options": given}} for name, given in options_of(family).items()}
    media_model(model).attach(Model(config={"model_type": family}, modalities=options))
    return model, read(family)


def options_of(family: str) -> dict[str, dict[str, Any]]:
    return {name: given for name, given in OPTIONS.items() if name in recipe_of(family).towers}


@cache
def read(family: str) -> dict[str, Modality]:
    with torch.device("meta"):
        skeleton = AutoModelForMultimodalLM.from_config(tiny_config(family))
    return recipe_of(family).modalities(skeleton, None, options_of(family))


def picture(height: int, width: int, seed: int = 0) -> Media:
    return Media("image", np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8), {})


def clip(frames: int, height: int, width: int, seed: int = 0) -> Media:
    values = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3)).astype(np.uint8)
    return Media("video", values, {"fps": 4.0})


def sound(seconds: float, seed: int = 0) -> Media:
    wave = np.random.default_rng(seed).normal(0, 0.1, int(seconds * 16_000)).astype(np.float32)
    return Media("audio", wave, {"sampling_rate": 16_000})


def mix(family: str) -> list[list[Any]]:
    """Samples as contents, a number for so many tokens of text. Neighbours, order and kinds vary."""
    samples: list[list[Any]] = [
        [4, picture(40, 60), 5, picture(90, 50, 1), 6],
        [7],
        [3, clip(9, 40, 64), 2, picture(64, 64, 2), 4],
        [clip(4, 64, 32, 3), clip(6, 32, 90, 4), 5],
    ]
    if "audio" in recipe_of(family).towers:
        samples += [
            [2, sound(1.3), 4],
            [3, picture(50, 50, 5), sound(2.0, 1), 2, clip(5, 40, 40, 6), sound(1.05, 2), 3],
        ]
    return samples


@dataclass(frozen=True)
class Sample:
    ids: np.ndarray[Any, Any]
    items: list[Item]
    labels: torch.Tensor


def write(contents: Sequence[Any], modalities: dict[str, Modality], seed: int) -> Sample:
    dice, ids, items = np.random.default_rng(seed), [], []
    for part in contents:
        if isinstance(part, int):
            ids += dice.integers(8, 96, part).tolist()
            continue
        modality = modalities[part.modality]
        size = modality.encoder.measure(part)
        spans = []
        for run in [modality.begin, *(size.layout or (size.places,)), modality.end]:
            if isinstance(run, int):
                spans.append((len(ids), run))
                ids += [MARKS[modality.placeholder]] * run
            else:  # marks are tokens, and so is every other character
                ids += [MARKS.get(token, 8 + ord(token[0]) % 88) for token in re.findall(r"<\|\w+\|>|.", run)]
        items.append(Item(Port(part.modality, "encoder"), size, tuple(spans), False, part))
    array = np.array(ids, np.int32)
    labels = torch.from_numpy(np.append(array[1:], -100)).long()
    labels[labels < 8] = -100
    return Sample(array, items, labels)


def reference_inputs(
    family: str, sample: Sample, modalities: dict[str, Modality], dtype: torch.dtype
) -> dict[str, Any]:
    """One sample as Hugging Face's processors hand it to the model."""
    ids = torch.from_numpy(sample.ids).long()[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "vl" in family:
        inputs["mm_token_type_ids"] = (ids == MARKS["<|image_pad|>"]) + 2 * (ids == MARKS["<|video_pad|>"])
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item.media for item in sample.items if item.port.modality == kind]
        prepared = [modalities[kind].encoder.prepare(media) for media in items]
        if prepared:
            inputs[pixels] = torch.cat([item["pixels"] for item in prepared]).to(dtype)
            inputs[grid] = torch.stack([item["grid"] for item in prepared])
            if kind == "video" and "omni" in family:
                inputs["video_second_per_grid"] = torch.tensor([2 / 4.0] * len(items))
    sounds = [item.media for item in sample.items if item.port.modality == "audio"]
    if sounds:
        extractor = modalities["audio"].encoder.extractor
        mels = [
            extractor(s.value, sampling_rate=16_000, padding=True, truncation=False, return_tensors="pt")
            for s in sounds
        ]
        mels = [mel["input_features"][0].T.to(dtype) for mel in mels]
        inputs["input_features"] = torch.nn.utils.rnn.pad_sequence(mels, batch_first=True).transpose(1, 2)
        lengths = torch.tensor([len(mel) for mel in mels])
        inputs["feature_attention_mask"] = (torch.arange(lengths.max()) < lengths[:, None]).long()
    return inputs


def packed_inputs(
    family: str, samples: Sequence[Sample], modalities: dict[str, Modality], model: PreTrainedModel
) -> dict[str, Any]:
    """All samples as one pack, as the loader and `localize` make it; items come in another order than their places."""
    lengths = [len(sample.ids) for sample in samples]
    starts = list(accumulate(lengths, initial=0))
    positions = [recipe_of(family).positions(model, sample.ids, sample.items) for sample in samples]
    places: dict[Port, list[Any]] = {Port(name, "encoder"): [] for name in modalities}
    for sample, start in zip(samples, starts, strict=False):
        for item in sample.items:
            index = np.concatenate([np.arange(start + first, start + first + rows) for first, rows in item.spans])
            places[item.port].append((item.media, index))
    for listed in places.values():
        listed.reverse()
    index = {
        port: torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *(at for _, at in listed)]))
        for port, listed in places.items()
    }
    media = MediaBatch(
        items={port: [port.module(modalities).prepare(item) for item, _ in listed] for port, listed in places.items()},
        deliver=lambda made: {
            port: Delivered(Features(value, index[port]), Features(value[:0], index[port][:0]))
            for port, value in made.items()
        },
        device=torch.device("cpu"),
        dtype=model.dtype,
    )
    bounds = torch.tensor(starts, dtype=torch.int32)
    return {
        "input_ids": torch.from_numpy(np.concatenate([sample.ids for sample in samples])).long()[None],
        "position_ids": torch.from_numpy(np.concatenate(positions, axis=1))[:, None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
        "media": media,
    }


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[0], labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize(("precision", "loss_error", "gradient_error"), [("fp32", 1e-6, 1e-5), ("fp64", 1e-11, 1e-10)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_of_mixed_media_gives_the_losses_and_gradients_of_its_samples_one_by_one(
    family: str, precision: str, loss_error: float, gradient_error: float
) -> None:
    model, modalities = ours(family, precision)
    reference = deepcopy(tiny_model(family, precision))
    samples = [write(contents, modalities, seed) for seed, contents in enumerate(mix(family))]
    labels = [sample.labels for sample in samples]
    with exact(precision):
        expected = torch.zeros((), dtype=DTYPE[precision])
        for sample in samples:
            out = reference(**reference_inputs(family, sample, modalities, DTYPE[precision]), use_cache=False)
            expected = expected + loss_of(out.logits, sample.labels)
        logits = model(**packed_inputs(family, samples, modalities, model)).logits
        loss = loss_of(logits, torch.cat(labels))
    expected.backward()
    loss.backward()
    assert abs(loss - expected) <= loss_error * abs(expected)
    wanted, found = gradients(reference), gradients(model)
    assert wanted.keys() == found.keys() == dict(model.named_parameters()).keys()  # all towers, every level
    # A bias of keys moves all logits of a query alike, which softmax does not see: its gradient is only rounding.
    scale = {name: wanted[name.replace("k_proj.bias", "q_proj.bias")].norm() for name in wanted}
    worst = {name: ((found[name] - value).norm() / scale[name]).item() for name, value in wanted.items()}
    assert max(worst.values()) <= gradient_error, max(worst, key=worst.__getitem__)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_attends_once_per_layer_and_gives_what_it_gives_frame_by_frame(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the model's own way in, with torch's attention, which splits by the lengths of frames and windows."""
    calls: list[int] = []

    def counted(query: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append(query.shape[2])
        return packed_attention(query, *args)

    monkeypatch.setattr(attention, "packed_attention", counted)
    model, modalities = ours(family, "fp32")
    own = deepcopy(tiny_model(family, "fp32"))
    built = media_model(model).modalities(Model(config={"model_type": family}))
    encoders = {name: modality.encoder for name, modality in built.items()}
    media = {
        "image": [picture(40, 60), picture(90, 50, 1)],
        "video": [clip(9, 40, 64), clip(4, 64, 32, 3)],
        "audio": [sound(1.3), sound(9.5, 1)],  # less than a window, and more
    }
    for name, encoder in encoders.items():
        items = [modalities[name].encoder.prepare(item) for item in media[name]]
        calls.clear()
        model.zero_grad()
        own.zero_grad()
        found = encoder.encode(items)
        layers = encoder.tower.layers if name == "audio" else encoder.tower.blocks
        assert len(calls) == len(layers)
        if name == "audio":
            mels = [item["mels"] for item in items]
            mask = torch.arange(max(map(len, mels))) < torch.tensor([[len(mel)] for mel in mels])
            features = torch.nn.utils.rnn.pad_sequence(mels, batch_first=True).transpose(1, 2)
            wanted = own.get_audio_features(features, mask.long(), return_dict=True).last_hidden_state
        else:
            pixels, grids = torch.cat([item["pixels"] for item in items]), torch.stack([i["grid"] for i in items])
            out = own.get_image_features(pixels, grids, return_dict=True)
            wanted = torch.cat([torch.cat(level) for level in (out.pooler_output, *out.deepstack_features)], 1)
        assert (found - wanted).norm() < 1e-6 * wanted.norm()
        grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
        found.backward(grad)
        wanted.backward(grad)
        ours_by_name, theirs = gradients(model), gradients(own)
        assert ours_by_name.keys() == theirs.keys()
        for key, gradient in theirs.items():
            assert (ours_by_name[key] - gradient).norm() <= 1e-6 * gradient.norm().clamp(min=1e-6), key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_is_called_once_for_images_and_clips_together(family: str) -> None:
    model, modalities = ours(family, "fp32")
    called: list[str] = []
    for name in set(recipe_of(family).towers.values()):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    samples = [write(contents, modalities, seed) for seed, contents in enumerate(mix(family))]
    with torch.no_grad():
        model(**packed_inputs(family, samples, modalities, model))
    assert sorted(called) == sorted(set(recipe_of(family).towers.values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_item_gives_the_same_rows_in_any_company_and_as_many_as_its_header_promised(family: str) -> None:
    media = {
        "image": [picture(40, 60), picture(300, 20, 1), picture(33, 33, 2)],
        "video": [clip(2, 64, 64), clip(9, 40, 90, 1), clip(1, 64, 32, 2)],
        "audio": [sound(0.31), sound(2.0, 1), sound(0.97, 2), sound(9.2, 3), sound(0.03, 4)],
    }
    model = tiny_model(family, "fp64")
    for name, modality in recipe_of(family).modalities(model, None, options_of(family)).items():
        encoder = modality.encoder
        items = [place(encoder.prepare(item), torch.device("cpu"), torch.float64) for item in media[name]]
        with torch.no_grad(), exact("fp64"):
            alone = [encoder.encode([item]) for item in items]
            together = encoder.encode(items)
        assert [len(rows) for rows in alone] == [encoder.measure(item).places for item in media[name]]
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-11, atol=1e-11)
        assert len(encoder.encode([place(encoder.blank(), torch.device("cpu"), torch.float64)])) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_long_item_give_what_the_whole_gives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_towers, "MOST_PATCHES", 16)
    monkeypatch.setattr(qwen_towers, "MOST_WINDOWS", 1)
    model = tiny_model(family, "fp64")
    long = {"video": clip(22, 90, 64), "audio": sound(19.3)}
    for name, modality in recipe_of(family).modalities(model, None, options_of(family)).items():
        encoder, media = modality.encoder, long.get(name, picture(200, 200))
        size, inputs = encoder.measure(media), encoder.prepare(media)
        parts = encoder.parts(size, inputs)
        assert (len(parts) > 2) == (name in long)
        assert sum(part.places for part, _ in parts) == size.places
        assert sum(part.cost for part, _ in parts) == pytest.approx(size.cost)
        assert [encoder.places(own) for _, own in parts] == [part.places for part, _ in parts]
        assert all(own.keys() == inputs.keys() for _, own in parts)
        on_host = torch.device("cpu")
        with torch.no_grad(), exact("fp64"):
            whole = encoder.encode([place(inputs, on_host, torch.float64)])
            apart = [encoder.encode([place(own, on_host, torch.float64)]) for _, own in parts]
        torch.testing.assert_close(torch.cat(apart), whole, rtol=1e-11, atol=1e-11)
        if name not in long:
            continue
        # Whatever the runs of its places, each part has its own.
        spans = ((3, 2), (9, size.places - 5), (9 + size.places, 3))
        items = Item(Port(name, "encoder"), size, spans, False, media).cut(parts)
        tokens = [token for first, count in spans for token in range(first, first + count)]
        assert [token for item in items for first, n in item.spans for token in range(first, first + n)] == tokens
        assert [sum(n for _, n in item.spans) for item in items] == [part.places for part, _ in parts]


def test_a_sound_under_a_second_has_the_rows_that_the_model_gives_it_next_to_a_longer_one() -> None:
    model = tiny_model("qwen3_omni_moe_thinker", "fp64")
    encoder = read("qwen3_omni_moe_thinker")["audio"].encoder
    encoder = type(encoder)(model, None)
    mels = [encoder.prepare(sound(seconds, 1))["mels"].double() for seconds in (0.4, 1.7)]
    features = torch.nn.utils.rnn.pad_sequence(mels, batch_first=True).transpose(1, 2)
    mask = torch.arange(features.shape[2]) < torch.tensor([[len(mel)] for mel in mels])
    with torch.no_grad():
        both = model.get_audio_features(features, mask.long(), return_dict=True).last_hidden_state
        short = encoder.encode([{"mels": mels[0]}])
    torch.testing.assert_close(short, both[: len(short)], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_media_the_towers_take_part_and_their_gradients_are_zero(family: str) -> None:
    model, modalities = ours(family, "fp64")
    samples = [write([9], modalities, 0), write([6], modalities, 1)]
    logits = model(**packed_inputs(family, samples, modalities, model)).logits
    loss_of(logits, torch.cat([sample.labels for sample in samples])).backward()
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    is_tower = tuple(f"{tower}." for tower in recipe_of(family).towers.values())
    assert all(bool(grad.any()) != name.startswith(is_tower) for name, grad in found.items() if "embed" not in name)


@pytest.mark.parametrize("family", FAMILIES)
def test_recipe_names_what_the_model_has(family: str) -> None:
    model, recipe = tiny_model(family, "fp32"), recipe_of(family)
    kinds = {type(model.get_submodule(name)).__name__ for name in read_facts(model).blocks}
    assert kinds == set(recipe.blocks)  # and none is nested in another, as whole towers would be
    assert len(read_facts(model).blocks) == 3 + 3 + (2 if "audio" in recipe.towers else 0)
    for modality, projectors in recipe.projectors.items():
        assert all(name.startswith(f"{recipe.towers[modality]}.") for name in projectors)
        assert all(any(True for _ in model.get_submodule(name).parameters()) for name in projectors)
    for name, modality in recipe.modalities(model, None, {}).items():
        assert not list(modality.encoder.parameters())  # they are the model's, and only the model's
        assert not list(modality.encoder.children())
        assert getattr(model.config, f"{name}_token_id") == MARKS[modality.placeholder]


@pytest.mark.parametrize("family", FAMILIES)
def test_published_config_shrinks_to_one_that_uses_every_part(family: str) -> None:
    small = shrink_config(
        AutoConfig.for_model(family, text_config={"num_attention_heads": 32, "num_key_value_heads": 4}), Shrinking()
    )
    config = AutoConfig.for_model(small.pop("model_type"), **small)
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(config)
    text, vision = config.text_config, config.vision_config
    assert sum(weight.numel() for weight in model.parameters()) < 60e6  # all but the vocabulary's and many experts'
    assert text.hidden_size == vision.out_hidden_size
    assert "audio" not in recipe_of(family).towers or text.hidden_size == config.audio_config.output_dim
    assert len(vision.deepstack_visual_indexes) == vision.depth == text.num_hidden_layers - 1 == 2
    assert sum(text.rope_parameters["mrope_section"]) == 16 // 2


def test_steps_of_a_clip_stand_between_their_times_as_the_processor_writes_them() -> None:
    from transformers import Qwen3VLProcessor

    modality = read("qwen3_vl")["video"]
    media = clip(9, 64, 96)
    times, (height, width) = modality.encoder.sample(media)
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
        _calculate_timestamps=lambda *args: Qwen3VLProcessor._calculate_timestamps(None, *args),
    )
    grid = torch.tensor([[-(-len(times) // 2), height // 16, width // 16]])
    metadata = SimpleNamespace(fps=1.0, frames_indices=list(times))
    video = {"video_grid_thw": grid, "video_metadata": [metadata]}
    size = modality.encoder.measure(media)
    written = "".join(run if isinstance(run, str) else "<|video_pad|>" * run for run in size.layout)
    assert written == Qwen3VLProcessor.replace_video_token(processor, video, 0)
    assert read("qwen3_omni_moe_thinker")["video"].encoder.measure(media).layout == ()


def test_frames_become_patches_as_the_video_processor_makes_them() -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    encoder = read("qwen3_vl")["video"].encoder
    media = clip(5, 64, 96)  # resized to itself; the fifth frame is a step with itself
    frames = torch.from_numpy(media.value).permute(0, 3, 1, 2)[None] / 255 * 2 - 1
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, frames, patch_size=16, merge_size=2, temporal_patch_size=2)
    prepared = encoder.prepare(media)
    assert prepared["grid"].tolist() == grid == [3, 4, 6]
    torch.testing.assert_close(prepared["pixels"], patches[0], rtol=0, atol=1e-6)


def test_settings_of_the_folder_come_before_ours_and_options_before_both(tmp_path: Path) -> None:
    from transformers import Qwen2VLImageProcessorPil

    published = Qwen2VLImageProcessorPil(
        image_mean=[0.1] * 3, size={"shortest_edge": 4096, "longest_edge": 8192}, patch_size=16
    )
    published.save_pretrained(tmp_path)
    model, build = tiny_model("qwen3_vl", "fp32"), recipe_of("qwen3_vl").modalities
    encoder = build(model, str(tmp_path), {})["image"].encoder
    assert encoder.pixels == (4096, 8192)
    media = picture(100, 50)
    torch.testing.assert_close(
        encoder.prepare(media)["pixels"], published(images=media.value, return_tensors="pt")["pixel_values"]
    )
    assert build(model, str(tmp_path), {"image": {"max_pixels": 5000}})["image"].encoder.pixels == (4096, 5000)
    with pytest.raises(UserError, match=r"model.modalities.image.encoder.options: .*max_pixel"):
        build(model, None, {"image": {"max_pixel": 5000}})
    with pytest.raises(BadMedia, match="200 times"):
        encoder.measure(picture(2, 500))


def test_the_thinker_is_loaded_from_a_folder_of_the_whole_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3_omni_moe_thinker", "fp32")
    model.save_pretrained(tmp_path)
    weights = {f"thinker.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights | {"talker.model.norm.weight": torch.ones(3)}, tmp_path / "whole.safetensors")
    with torch.device("meta"):
        loaded = AutoModelForMultimodalLM.from_config(tiny_config("qwen3_omni_moe_thinker"))
    report = load_files(loaded, [tmp_path / "whole.safetensors"], conversion_mapping(loaded), torch.device("cpu"))
    assert (report.missing, report.unexpected, report.mismatched) == (set(), set(), set())
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_modalities_are_built_once_and_copied_for_the_loader(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    make = Tower.__init__
    monkeypatch.setattr(Tower, "__init__", lambda self, *given: (built.append(type(self)), make(self, *given))[1])
    spec = Model(config={"model_type": family})
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(tiny_config(family))
    loaded = read_modalities(model, spec)["modalities"]
    media_model(model).attach(spec)
    own = media_model(model).modalities(spec)
    assert len(built) == len(own) == len(loaded)
    for name, modality in own.items():
        assert modality.encoder.model is model
        assert loaded[name].encoder.model is not model


def publish(family: str, folder: Path) -> PreTrainedModel:
    """A folder as the family is published in, with random weights and a tokenizer of its own."""
    marks = [*MARKS][: len(MARKS) if "omni" in family else 4]
    tokenizer = make_tokenizer(folder, special_tokens=tuple(marks))
    config = tiny_config(family)
    config.text_config.vocab_size = len(tokenizer)
    for name in [name for name in vars(config) if name.endswith("_token_id") and getattr(config, name) is not None]:
        old = [mark for mark, number in MARKS.items() if number == getattr(config, name)]
        setattr(config, name, tokenizer.convert_tokens_to_ids(old[0]) if old else getattr(config, name))
    torch.manual_seed(1)
    model = AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def generation_inputs(model: PreTrainedModel, ids: list[int], items: Sequence[Item]) -> dict[str, Any]:
    """A prompt as Hugging Face's processors hand it to `generate`."""
    tokens = torch.tensor([ids])
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    for name, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        own = [item.inputs for item in items if item.port.modality == name]
        if own:
            inputs[pixels] = torch.cat([item["pixels"] for item in own])
            inputs[f"{name}_grid_thw"] = torch.stack([item["grid"] for item in own])
    sounds = [item.inputs["mels"] for item in items if item.port.modality == "audio"]
    if "omni" not in model.config.model_type:
        config: Any = model.config
        inputs["mm_token_type_ids"] = (tokens == config.image_token_id) + 2 * (tokens == config.video_token_id)
    elif sounds:
        inputs["input_features"] = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True).transpose(1, 2)
        lengths = torch.tensor([len(mels) for mels in sounds])
        inputs["feature_attention_mask"] = (torch.arange(lengths.max()) < lengths[:, None]).long()
    if "omni" in model.config.model_type and "pixel_values_videos" in inputs:
        seconds = [item.size.shape[3] for item in items if item.port.modality == "video"]
        inputs["video_second_per_grid"] = torch.tensor(seconds)
    return inputs


def question(family: str, folder: Path) -> tuple[dict[str, str], list[dict[str, str]], list[str]]:
    """Words, an item of each modality of the family, as parts of a message; and the files of two pictures."""
    media = make_media(folder / "media", random.Random(0), count=2)
    # Of a sound below a second, Hugging Face's tower makes something that depends on what else is in the batch.
    soundfile.write(folder / media["audio"][0], np.random.default_rng(0).normal(0, 0.1, 22_000), 16_000)
    kinds = [name for name in ("image", "video", "audio") if name in recipe_of(family).towers]
    parts = [{"type": kind, kind: str(folder / media[kind][0])} for kind in kinds]
    words = {"type": "text", "text": "What is the capital of France?"}
    return words, parts, [str(folder / name) for name in media["image"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_writes_what_transformers_own_generate_writes(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = publish(family, tmp_path / "model")
    words, parts, images = question(family, tmp_path)
    again = {"type": "image", "image": images[1]}
    prompts: list[Any] = [[words], [parts[0], words], [*reversed(parts), words, again, words], [words, *parts]]
    writer = load_writer(tmp_path / "model")
    answers = []
    for content in prompts:
        messages = [{"role": "user", "content": content}]
        prompt = writer.renderer.prompt(messages)
        items = [replace(i, inputs=i.port.module(writer.modalities).prepare(i.media)) for i in prompt.items]
        assert len(items) == sum(part["type"] != "text" for part in content)
        inputs = generation_inputs(reference, prompt.ids.tolist(), items)
        never = [writer.tokenizer.convert_tokens_to_ids(mark) for mark in MARKS if mark.endswith("_pad|>")]
        written = reference.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=[writer.tokenizer.eos_token_id, *writer.renderer.end_of_turn()],
            suppress_tokens=[token for token in never if token is not None],  # nobody could tell what they stand for
        )
        expected = written[0, len(prompt.ids) :].tolist()
        (piece,) = writer.write(messages, Sampling(temperature=0), max_tokens=16)
        assert piece.ids == expected[: len(piece.ids)], family
        assert len(piece.ids) == 16 or len(expected) == len(piece.ids) + 1
        answers.append(tuple(piece.ids))
    assert len(set(answers)) == len(answers)  # media matter

    (tmp_path / "question.json").write_text(json.dumps([{"role": "user", "content": prompts[-1]}]))
    asked = ["generate", str(tmp_path / "model"), "--messages", str(tmp_path / "question.json")]
    assert main([*asked, "--temperature", "0", "--max-tokens", "16"]) == 0
    assert capsys.readouterr().out.strip() == writer.tokenizer.decode(answers[-1], skip_special_tokens=True).strip()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_omni_moe_thinker"])
def test_an_engine_scores_what_transformers_own_generate_wrote_about_media(family: str, tmp_path: Path) -> None:
    reference = publish(family, tmp_path / "model")
    words, parts, _ = question(family, tmp_path)
    config: dict[str, Any] = {"model": {"path": str(tmp_path / "model")}, "log": {"dir": str(tmp_path / "run")}}
    config |= {"data": {"pack_tokens": 1024}, "train": {"losses": [{"kind": "gspo"}]}}
    with Engine.start(config) as engine:
        renderer = engine._reader.renderer
        rollouts, expected = [], []
        for content in ([words], [parts[0], words], [*reversed(parts), words]):
            messages = [{"role": "user", "content": content}]
            prompt = renderer.prompt(messages)
            items = [replace(i, inputs=i.port.module(engine._reader.modalities).prepare(i.media)) for i in prompt.items]
            torch.manual_seed(0)
            out = reference.generate(
                **generation_inputs(reference, prompt.ids.tolist(), items),
                do_sample=True,
                top_k=0,
                num_return_sequences=3,
                max_new_tokens=8,
                suppress_tokens=renderer.placeholders,
                return_dict_in_generate=True,
                output_logits=True,
            )
            answers = out.sequences[:, len(prompt.ids) :]
            each = torch.stack(out.logits, 1).log_softmax(-1).gather(2, answers[..., None]).squeeze(2)
            rollouts += [Rollout(messages, answer) for answer in answers]
            expected += list(each)
        found = engine.log_probabilities(rollouts)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
        full = [
            replace(r, advantage=(-1.0) ** i, old=own) for i, (r, own) in enumerate(zip(rollouts, found, strict=True))
        ]
        assert engine.step(full)["loss/gspo/ratio"] == pytest.approx(1, abs=1e-5)
