"""Tiny published models that read media: their samples as packs of ours, and as Hugging Face's forward takes them."""

import io
import random
import re
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from fixtures import make_tokenizer
from omni import make_media
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from omnizoo.config.sections.model import ModelSection
from omnizoo.modalities.base import Modality, find_module
from omnizoo.modalities.files.audio import read_audio
from omnizoo.modalities.item import MediaItem, NestedRun, Port
from omnizoo.modalities.media import Media
from omnizoo.models.hf_private import PACKED, language_model
from omnizoo.models.interfaces.experts import use_dispatched
from omnizoo.models.interfaces.recurrent import bind_states
from omnizoo.models.media.batch import MediaBatch, PromptTransport
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.recipe import recipe_of

# The module asks for torchvision where it is loaded, but only to resize frames: which ones it takes is its own.
ABSENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")
with patch.dict(sys.modules, {name: ModuleType(name) for name in ABSENT if find_spec("torchvision") is None}):
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

# As each family's tokenizer spells them; ids below 8 are never learnt.
MARKS = {
    "<|vision_start|>": 1,
    "<|vision_end|>": 2,
    "<|image_pad|>": 3,
    "<|video_pad|>": 4,
    "<|audio_start|>": 5,
    "<|audio_pad|>": 6,
    "<|audio_end|>": 7,
}
OMNI_25_MARKS = dict(
    zip(
        ("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
        MARKS.values(),
        strict=True,
    )
)
GLM_MARKS = {
    "<|begin_of_image|>": 1,
    "<|end_of_image|>": 2,
    "<|image|>": 3,
    "<|begin_of_video|>": 5,
    "<|end_of_video|>": 7,
}
DTYPE = {"fp32": torch.float32, "fp64": torch.float64}
SMALL = {"min_pixels": 32 * 32, "max_pixels": 6 * 32 * 32}
OPTIONS = {"image": SMALL, "video": SMALL | {"max_pixels": 40 * 32 * 32, "fps": 4.0}, "audio": {}}


def marks_of(family: str) -> dict[str, int]:
    marks = OMNI_25_MARKS if family == "qwen2_5_omni_thinker" else GLM_MARKS if "glm" in family else MARKS
    return marks if "audio" in encoded(family) or "glm" in family else dict([*marks.items()][:4])


def tiny_config(family: str) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {"depth": 3, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32}
    audio = {"encoder_layers": 2, "d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 24}
    audio |= {"output_dim": 32, "num_mel_bins": 32}
    ids = {f"{kind}_token_id": MARKS[f"<|{kind}_pad|>"] for kind in ("image", "video", "audio")}
    ids |= {"vision_start_token_id": 1, "vision_end_token_id": 2, "audio_start_token_id": 5}
    if "qwen3" in family:
        rope["mrope_interleaved"] = True
        text["head_dim"] = 8
        vision |= {"num_position_embeddings": 16}
        audio |= {"downsample_hidden_size": 4}
    if "qwen3_5" in family:
        rope |= {"partial_rotary_factor": 0.75, "mrope_section": [1, 1, 1]}
        text |= {"linear_key_head_dim": 4, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
        text |= {"linear_num_value_heads": 4, "shared_expert_intermediate_size": 16}
        text |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    elif "qwen3" in family:
        vision |= {"deepstack_visual_indexes": [0, 2]}
    elif family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32}
        vision = {key: value for key, value in vision.items() if key not in ("intermediate_size", "out_hidden_size")}
    elif "qwen2_5" in family:  # windows of 2 x 2 places
        vision |= {"fullatt_block_indexes": [1], "window_size": 56}
        audio |= {"n_window": 50}
    elif "glm" in family:
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
        vision |= {"image_size": 56}
        experts = experts | {"n_routed_experts": 4, "n_shared_experts": 1}
        del experts["num_experts"]
        ids = {"image_token_id": 3, "video_token_id": 4, "image_start_token_id": 1, "image_end_token_id": 2}
        ids |= {"video_start_token_id": 5, "video_end_token_id": 7}
    parts = {"text_config": text | (experts if "moe" in family else {}), "vision_config": vision}
    if "audio" in encoded(family):
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
    bind_states(language_model(model))
    if "moe" in family:
        use_dispatched(language_model(model))
    options = {name: {"encoder": {"options": given}} for name, given in options_of(family).items()}
    media_model(model).attach(ModelSection(config={"model_type": family}, modalities=options))
    return model, read(family)


def options_of(family: str) -> dict[str, dict[str, Any]]:
    return {name: given for name, given in OPTIONS.items() if name in encoded(family)}


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


@cache
def film(frames: int, height: int, width: int, seconds: float, seed: int = 0) -> Media:
    """A clip as a file, of four frames a second, with its own sound."""
    dice, file = np.random.default_rng(seed), io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream, track = container.add_stream("mpeg4", rate=4), container.add_stream("aac", rate=16_000)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for _ in range(frames):
            picture = dice.integers(0, 256, (height, width, 3)).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
        wave = dice.normal(0, 0.1, (1, int(seconds * 16_000))).astype(np.float32)
        heard = av.AudioFrame.from_ndarray(wave, format="fltp", layout="mono")
        heard.sample_rate = 16_000
        container.mux(track.encode(heard))
        container.mux(track.encode())
    return Media("video", file.getvalue(), {"use_audio_in_video": True})


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
    if "glm" in family:  # whose own forward takes one kind of media at a time: they share a placeholder
        samples[2] = [3, clip(9, 40, 64), 6]
    if "audio" in encoded(family):
        samples += [
            [2, sound(1.3), 4],
            [3, picture(50, 50, 5), sound(2.0, 1), 2, clip(5, 40, 40, 6), sound(1.05, 2), 3],
            [2, film(13, 64, 64, 3.4), 3, picture(32, 64, 7), 1, sound(1.2, 3), film(4, 64, 32, 1.6, 1), 2],
        ]
    return samples


@dataclass(frozen=True)
class Sample:
    ids: np.ndarray[Any, Any]
    items: list[MediaItem]
    labels: torch.Tensor


def write(contents: Sequence[Any], modalities: dict[str, Modality], seed: int) -> Sample:
    marks = MARKS | OMNI_25_MARKS | GLM_MARKS
    dice, ids, items = np.random.default_rng(seed), [], []
    for part in contents:
        if isinstance(part, int):
            ids += dice.integers(8, 96, part).tolist()
            continue
        modality = modalities[part.modality]
        size = modality.encoder.measure(part)
        spans: dict[str, list[tuple[int, int]]] = {part.modality: [], **{name: [] for name in size.inside}}
        for run in [modality.begin, *(size.layout or (size.num_placeholders,)), modality.end]:
            if isinstance(run, str):  # marks are tokens, and so is every other character
                ids += [marks.get(token, 8 + ord(token[0]) % 88) for token in re.findall(r"<\|\w+\|>|.", run)]
                continue
            name, count = run if isinstance(run, NestedRun) else (part.modality, run)
            spans[name].append((len(ids), count))
            ids += [marks[modalities[name].placeholder]] * count
        for name, own in spans.items():
            medium = replace(part, modality=name)
            items.append(MediaItem(Port(name, "encoder"), size.inside.get(name, size), tuple(own), False, medium))
    array = np.array(ids, np.int32)
    labels = torch.from_numpy(np.append(array[1:], -100)).long()
    labels[labels < 8] = -100
    return Sample(array, items, labels)


def published_frames(family: str, frames: int, rate: float, **settings: Any) -> list[int]:
    """Indices of the frames that the family's own video processor takes. It needs torchvision to be built, but not to
    be asked."""
    kind = Glm4vVideoProcessor if "glm" in family else Qwen2VLVideoProcessor
    kind = Qwen3VLVideoProcessor if family.startswith(("qwen3_vl", "qwen3_5")) else kind
    defaults = {"fps": None, "num_frames": None} | {n: getattr(kind, n) for n in dir(kind) if not n.startswith("_")}
    own = SimpleNamespace(**defaults | settings)
    metadata = SimpleNamespace(total_num_frames=frames, fps=rate, duration=frames / rate)
    given = {name: settings.get(name) for name in ("fps", "num_frames")}
    return [int(index) for index in kind.sample_frames(own, metadata, **given)]


def reference_inputs(
    family: str, sample: Sample, modalities: dict[str, Modality], dtype: torch.dtype
) -> dict[str, Any]:
    """One sample as Hugging Face's processors hand it to the model."""
    ids = torch.from_numpy(sample.ids).long()[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "omni" not in family:
        inputs["mm_token_type_ids"] = token_kinds(family, ids)
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        items = [item.media for item in sample.items if item.port.modality == kind]
        prepared = [modalities[kind].encoder.prepare(media) for media in items]
        if prepared:
            inputs[pixels] = torch.cat([item["pixels"] for item in prepared]).to(dtype)
            inputs[grid] = torch.stack([item["grid"] for item in prepared])
        if prepared and kind == "video" and "omni" in family:
            inputs["video_second_per_grid"] = torch.tensor([2 / 4.0] * len(items))
            inputs["use_audio_in_video"] = "use_audio_in_video" in items[0].options
        elif prepared and kind == "video" and family == "qwen2_5_vl":
            counts = [(len(published_frames(family, len(item.value), 4.0, fps=4.0)), len(item.value)) for item in items]
            inputs["second_per_grid_ts"] = torch.tensor([2 / (taken / there * 4.0) for taken, there in counts])
    waves = [read_audio(item.media, 16_000) for item in sample.items if item.port.modality == "audio"]
    if waves:
        inputs |= heard(family, waves, modalities["audio"].encoder.extractor, dtype)
    return inputs


def token_kinds(family: str, ids: torch.Tensor, marks: Mapping[str, int] | None = None) -> torch.Tensor:
    """Of images 1, of clips 2. GLM writes clips with the placeholder of images."""
    marks = marks or marks_of(family)
    if "glm" not in family:
        return (ids == marks["<|image_pad|>"]) + 2 * (ids == marks["<|video_pad|>"])
    begun, ended = ((ids == marks[name]).cumsum(1) for name in ("<|begin_of_video|>", "<|end_of_video|>"))
    return (ids == marks["<|image|>"]) * (1 + (begun > ended).long())


def heard(family: str, waves: Sequence[Any], extractor: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Sounds as the family's processor hands them to the model."""
    given = {"sampling_rate": 16_000, "return_tensors": "pt"}
    if family == "qwen2_5_omni_thinker":
        out = extractor(waves, padding="max_length", return_attention_mask=True, **given)
        return {
            "input_features": out["input_features"].to(dtype),
            "feature_attention_mask": out["attention_mask"].long(),
        }
    mels = [extractor(wave, padding=True, truncation=False, **given)["input_features"][0].T.to(dtype) for wave in waves]
    lengths = torch.tensor([len(mel) for mel in mels])
    return {
        "input_features": torch.nn.utils.rnn.pad_sequence(mels, batch_first=True).transpose(1, 2),
        "feature_attention_mask": (torch.arange(lengths.max()) < lengths[:, None]).long(),
    }


def encoded(family: str) -> dict[str, str]:
    """The module that encodes each modality."""
    return {module.modality: module.module for module in recipe_of(family).media_modules if module.role == "encoder"}


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
        items={
            port: [find_module(modalities, port).prepare(item) for item, _ in listed] for port, listed in places.items()
        },
        transport=PromptTransport(index),
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


def publish(family: str, folder: Path) -> PreTrainedModel:
    """A folder as the family is published in, with random weights and a tokenizer of its own."""
    marks = marks_of(family)
    tokenizer = make_tokenizer(folder, special_tokens=tuple(marks))
    config = tiny_config(family)
    config.text_config.vocab_size = len(tokenizer)
    names = [name for name in vars(config) if name.endswith(("_token_id", "_token_index"))]
    for name in [name for name in names if getattr(config, name) is not None]:
        old = [mark for mark, number in marks.items() if number == getattr(config, name)]
        setattr(config, name, tokenizer.convert_tokens_to_ids(old[0]) if old else getattr(config, name))
    torch.manual_seed(1)
    model = AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def generation_inputs(model: PreTrainedModel, ids: list[int], items: Sequence[MediaItem]) -> dict[str, Any]:
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
        marks = {"<|image_pad|>": config.image_token_id, "<|video_pad|>": config.video_token_id}
        if "glm" in config.model_type:
            marks = {"<|image|>": config.image_token_id, "<|begin_of_video|>": config.video_start_token_id}
            marks["<|end_of_video|>"] = config.video_end_token_id
        inputs["mm_token_type_ids"] = token_kinds(config.model_type, tokens, marks)
    elif sounds:
        inputs["input_features"] = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True).transpose(1, 2)
        lengths = torch.tensor([len(mels) for mels in sounds])
        inputs["feature_attention_mask"] = (torch.arange(lengths.max()) < lengths[:, None]).long()
    if "pixel_values_videos" in inputs:
        seconds = torch.tensor([item.size.shape[3] for item in items if item.port.modality == "video"])
        if "omni" in model.config.model_type:
            inputs["video_second_per_grid"] = seconds
            inputs["use_audio_in_video"] = any(item.size.inside for item in items)
        elif model.config.model_type == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = seconds
    return inputs


def question(family: str, folder: Path) -> tuple[dict[str, str], list[dict[str, str]], list[str]]:
    """Words, an item of each modality of the family, as parts of a message; and the files of two pictures."""
    media = make_media(folder / "media", random.Random(0), count=2)
    # Of a sound below a second, Hugging Face's tower makes something that depends on what else is in the batch.
    soundfile.write(folder / media["audio"][0], np.random.default_rng(0).normal(0, 0.1, 22_000), 16_000)
    kinds = [name for name in ("image", "video", "audio") if name in encoded(family)]
    parts = [{"type": kind, kind: str(folder / media[kind][0])} for kind in kinds]
    words = {"type": "text", "text": "What is the capital of France?"}
    return words, parts, [str(folder / name) for name in media["image"]]
