"""Tiny published vision models: their samples as packs of ours, and as Hugging Face's forward takes them."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from published import clip, picture, sound
from tensor_processors import published_tensors, published_video
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoTokenizer, PreTrainedModel

from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.modalities.base import Modality, find_module
from omnizoo.modalities.item import MediaItem, Port
from omnizoo.models.hf_private import PACKED, language_model
from omnizoo.models.interfaces.experts import use_dispatched
from omnizoo.models.interfaces.recurrent import bind_states
from omnizoo.models.media.batch import MediaBatch, PromptTransport
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.recipe import read_facts

ROOT = Path(__file__).parents[2]
# Everything is read from the family's example, which `omnizoo verify` is run on as well.
FAMILIES = ("gemma3", "internvl", "mistral3", "gemma4", "llava", "llama4", "gemma4_unified", "kimi_k25", "minicpmv4_7")
TENSORS = ("llama4", "gemma4_unified", "kimi_k25")  # whose processors take tensors, and need torchvision
SINGLE = ("gemma4",)  # whose code for sound cannot run in fp64


def example(family: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / f"examples/published/{family}.yaml").read_text())["model"]
    return found


def tiny_config(family: str) -> Any:
    fields = dict(example(family)["config"])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@cache
def tiny_model(family: str, precision: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(tiny_config(family))
    model = model.double() if precision == "fp64" else model  # `to` would make complex buffers real
    shake(model)
    if read_facts(model).experts:
        model.set_experts_implementation("eager")  # grouped matmuls have no float64
    return model.eval()


@torch.no_grad()
def shake(model: PreTrainedModel) -> None:
    """Far enough from zero that every path matters, and no softmax so steep that fp32 cannot follow."""
    for name, parameter in model.named_parameters():
        parameter.normal_(0, 0.06) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
        if name.endswith("A_log"):  # slow decay: of states that are gone at once, gradients are mostly rounding
            parameter.sub_(3)
        if "q_norm" in name:
            parameter.mul_(0.25)
        if "embed_tokens" in name and model.config.model_type == "gemma4_unified":
            parameter.mul_(0.3)  # or the last token alone would decide what is written, by weights that head shares


def spec_of(family: str) -> ModelSection:
    return ModelSection(**example(family) | {"tokenizer": str(ROOT / example(family)["tokenizer"])})


def ours(family: str, precision: str) -> tuple[PreTrainedModel, dict[str, Modality]]:
    """The model as `parallelize` leaves it on one rank, and its modalities on a copy without weights."""
    model = deepcopy(tiny_model(family, precision))
    language_model(model).set_attn_implementation(PACKED)
    bind_states(language_model(model))
    if read_facts(model).experts:
        use_dispatched(language_model(model))
    media_model(model).attach(spec_of(family))
    return model, read(family)


@cache
def read(family: str) -> dict[str, Modality]:
    with torch.device("meta"):
        skeleton = AutoModelForMultimodalLM.from_config(tiny_config(family))
    return media_model(skeleton).modalities(spec_of(family))


@cache
def tokenizer(family: str) -> Any:
    return AutoTokenizer.from_pretrained(ROOT / example(family)["tokenizer"])


@dataclass(frozen=True)
class Sample:
    input_ids: np.ndarray[Any, Any]
    items: Sequence[MediaItem]
    labels: torch.Tensor


def mix(family: str) -> list[list[Any]]:
    """Samples as contents. Neighbours, order and shapes vary."""
    samples = [
        ["What are these? ", picture(40, 60), " And ", picture(90, 50, 1), "that?"],
        ["One plus one."],
        [picture(20, 120, 2), picture(64, 64, 3), "Both."],
        ["Look: ", picture(33, 33, 4)],
    ]
    if "audio" in read(family):
        samples += [["Listen: ", sound(0.71), " and ", sound(0.4, 1), picture(50, 50, 5)], [sound(0.93, 2), "So?"]]
    if "video" in read(family):
        samples += [
            ["See ", clip(9, 40, 64), " and ", clip(3, 60, 30, 1), picture(40, 40, 6)],
            [clip(4, 90, 50, 2), "?"],
        ]
    return samples


def write(family: str, contents: Sequence[Any]) -> Sample:
    """As the loader writes a row."""
    renderer = Renderer(tokenizer(family), False, read(family))
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": part.modality, part.modality: part.value} | part.options
        for part in contents
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "It is a square, I think."}]
    rendered = renderer.render({"messages": messages})
    labels = np.where(rendered.is_target, rendered.input_ids, -100)
    return Sample(rendered.input_ids, rendered.items, torch.from_numpy(np.append(labels[1:], -100)).long())


def reference_inputs(
    family: str, sample: Any, dtype: torch.dtype, modalities: Mapping[str, Modality] | None = None
) -> dict[str, Any]:
    """One sample as Hugging Face's processors hand it to the model."""
    config, ids = tiny_config(family), torch.from_numpy(sample.input_ids).long()[None]
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "gemma3":
        inputs["token_type_ids"] = (ids == config.image_token_id).long()
    if family.startswith("gemma4"):
        return inputs | gemma4_inputs(ids, sample, config, dtype, modalities or read(family))
    if family == "minicpmv4_7":
        own: Any = (modalities or read(family))["image"].encoder
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).long()
        if sample.items:
            out = own.processor(images=[item.media.value for item in sample.items], return_tensors="pt")
            inputs |= {"pixel_values": out["pixel_values"].to(dtype), "target_sizes": out["target_sizes"]}
        return inputs
    prepared = [(modalities or read(family))["image"].encoder.prepare(item.media)["pixels"] for item in sample.items]
    if not prepared:
        return inputs
    if family == "kimi_k25":
        out = published_tensors(family, [item.media for item in sample.items])
        return inputs | {"pixel_values": out["pixel_values"].to(dtype), "image_grid_thw": out["image_grid_thw"]}
    if family == "mistral3":
        sizes = torch.tensor([pixels.shape[1:] for pixels in prepared])
        whole = torch.zeros(len(prepared), 3, *sizes.amax(0).tolist())
        for filled, pixels in zip(whole, prepared, strict=True):
            filled[:, : pixels.shape[1], : pixels.shape[2]] = pixels
        return inputs | {"pixel_values": whole.to(dtype), "image_sizes": sizes}
    return inputs | {"pixel_values": torch.cat(prepared).to(dtype)}


def forward_of(model: Any, inputs: Mapping[str, Any]) -> Any:
    """The model's own forward. Gemma 4's (5.22.2) takes clips only when they are encoded already."""
    inputs = dict(inputs)
    if "pixel_values_videos" in inputs:
        names = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
        core = model.model
        outputs = {"video": core.get_video_features(**{name: inputs.pop(name) for name in names}, return_dict=True)}
        if "pixel_values" in inputs:
            told = [inputs.pop(name) for name in ("pixel_values", "image_position_ids")]
            outputs["image"] = core.get_image_features(*told, return_dict=True)
        inputs["mm_encoder_outputs"] = outputs
    return model(**inputs, use_cache=False)


def gemma4_inputs(
    ids: torch.Tensor, sample: Any, config: Any, dtype: torch.dtype, modalities: Mapping[str, Modality]
) -> dict[str, Any]:
    encoders: dict[str, Any] = {name: modality.encoder for name, modality in modalities.items()}
    kinds = {1: config.image_token_id, 2: config.video_token_id, 3: config.audio_token_id}
    inputs = {"mm_token_type_ids": sum(kind * (ids == token) for kind, token in kinds.items())}
    if clips := [item.media for item in sample.items if item.port.modality == "video"]:
        count = encoders["video"].num_frames
        chosen = [media.value[np.arange(count) * len(media.value) // count] for media in clips]
        out = published_video(config.model_type, chosen)
        inputs |= {"pixel_values_videos": out["pixel_values_videos"].to(dtype)}
        inputs |= {name: out[name] for name in ("video_position_ids", "num_frames_per_video")}
    pictures = [item.media for item in sample.items if item.port.modality == "image"]
    if pictures and config.model_type in TENSORS:
        out = published_tensors(config.model_type, pictures)
        inputs |= {"pixel_values": out["pixel_values"].to(dtype), "image_position_ids": out["image_position_ids"]}
    elif pictures:
        out = encoders["image"].processor(images=[media.value for media in pictures], return_tensors="pt")
        inputs |= {"pixel_values": out["pixel_values"].to(dtype), "image_position_ids": out["image_position_ids"]}
    sounds = [item.media for item in sample.items if item.port.modality == "audio"]
    if sounds:
        out = encoders["audio"].extractor([media.value for media in sounds], return_tensors="pt")
        inputs |= {"input_features": out["input_features"].to(dtype), "input_features_mask": out["input_features_mask"]}
    return inputs


def packed_inputs(family: str, samples: Sequence[Sample], model: PreTrainedModel) -> dict[str, Any]:
    """All samples as one pack, as the loader and `localize` make it; items come in another order than their places."""
    lengths = [len(sample.input_ids) for sample in samples]
    starts = list(accumulate(lengths, initial=0))
    places: dict[Port, list[Any]] = {Port(name, "encoder"): [] for name in read(family)}
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
    prepared = {port: [find_module(read(family), port).prepare(item) for item, _ in ls] for port, ls in places.items()}
    media = MediaBatch(
        items=prepared,
        transport=PromptTransport(index),
        device=torch.device("cpu"),
        dtype=model.dtype,
    )
    ids, bounds = np.concatenate([sample.input_ids for sample in samples]), torch.tensor(starts, dtype=torch.int32)
    mutual, rule = media_model(model).bidirectional, media_model(model).positions
    rows = [
        rule(sample.input_ids, sample.items) if rule else np.arange(len(sample.input_ids))[None] for sample in samples
    ]
    positions = torch.from_numpy(np.concatenate(rows, 1)).long()
    return {
        "input_ids": torch.from_numpy(ids).long()[None],
        "position_ids": positions[:, None] if rule else positions,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
        "media": media,
    } | ({"mutual": mutual.find(torch.from_numpy(ids), lengths)} if mutual else {})


def publish(family: str, folder: Path) -> PreTrainedModel:
    """A folder as the family is published in, with random weights."""
    model = deepcopy(tiny_model(family, "fp32"))
    model.save_pretrained(folder)
    tokenizer(family).save_pretrained(folder)
    processor: Any = getattr(read(family)["image"].encoder, "processor", None)
    if family in TENSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor.settings))
    else:
        processor.save_pretrained(folder)
    return model
