"""Tiny published models that hear or draw: rows of the examples as packs of ours, and as Hugging Face takes them."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from published import DTYPE
from transformers import (
    AudioFlamingo3Processor,
    ChameleonImageProcessorPil,
    ChameleonProcessor,
    Emu3ImageProcessor,
    Emu3Processor,
    JanusImageProcessorPil,
    JanusProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2AudioProcessor,
    Qwen3ASRFeatureExtractor,
    Qwen3ASRProcessor,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)

from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.sample import RenderedRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.modalities.base import find_module
from omnizoo.modalities.files.audio import read_audio
from omnizoo.modalities.item import Port
from omnizoo.modalities.media import Media
from omnizoo.models.build import build_model
from omnizoo.models.hf_private import PACKED, auto_class, language_model
from omnizoo.models.media.batch import MediaBatch, PromptTransport
from omnizoo.models.media.features import Features, MediaFeatures
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.read_config import read_model_config

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples/published/data"
HEARING, DRAWING = ("qwen2_audio", "voxtral", "qwen3_asr", "audioflamingo3"), ("janus", "emu3", "chameleon")

MARKS = {  # what a chat template writes for an item; processors make more of it
    "voxtral": "[BEGIN_AUDIO][AUDIO]",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    "audioflamingo3": "<sound>",
    "janus": "<image_placeholder>",
    "emu3": "<image>",
    "chameleon": "<image>",
}


def settings(family: str) -> ModelSection:
    """Of the example; tests run where its paths begin."""
    return load_config(ROOT / f"examples/published/{family}.yaml", []).model


@cache
def tiny_model(family: str, precision: str) -> PreTrainedModel:
    spec = settings(family)
    config = read_model_config(spec)
    torch.manual_seed(0)
    model = auto_class(config, False).from_config(config, dtype=DTYPE[precision])
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # far enough from zero that every path matters
            if "vqmodel" not in name:
                parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
        if hasattr(model.model, "vqmodel"):  # else all patches are nearest to one code
            model.model.vqmodel.quantize.embedding.weight.normal_(0, 0.1)
            model.model.vqmodel.requires_grad_(False)
    return model.eval()


def ours(family: str, precision: str) -> PreTrainedModel:
    """The model as `parallelize` leaves it on one rank."""
    model = deepcopy(tiny_model(family, precision))
    language_model(model).set_attn_implementation(PACKED)
    media_model(model).attach(settings(family))
    return model


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DATA / "voices")
    if family == "qwen2_audio":
        tokenizer.chat_template = Qwen2AudioProcessor.default_chat_template.fget(None)
    return tokenizer


def renderer(family: str) -> Renderer:
    """By modalities on a copy without weights, as loaders have them."""
    spec = settings(family)
    skeleton = build_model(spec, "fp32")
    return Renderer(tokenizer_of(family), False, media_model(skeleton).modalities(spec))


def rows(family: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    name = "spoken" if family in HEARING else "drawn"
    lines = (DATA / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(lines[number]) for number in numbers]


def read(family: str, row: dict[str, Any], reader: Renderer) -> RenderedRow:
    return reader.render(row, find=MediaFolder(DATA, None).find)


@dataclass(frozen=True)
class PackTransport(PromptTransport):
    """Of one rank: targets are predicted by the token before them."""

    is_predicted: Mapping[Port, torch.Tensor] = field(kw_only=True)

    def exchange(self, features: Mapping[Port, torch.Tensor]) -> dict[Port, MediaFeatures]:
        received = {}
        for port, rows in features.items():
            index, chosen = self.index[port], self.is_predicted[port]
            received[port] = MediaFeatures(Features(rows, index), Features(rows[chosen], index[chosen] - 1))
        return received


def packed(samples: Sequence[RenderedRow], reader: Renderer, model: PreTrainedModel) -> dict[str, Any]:
    """All samples as one pack; items come in another order than their places."""
    modalities, ports = reader.notation.modalities, media_model(model).ports
    lengths = [len(sample.input_ids) for sample in samples]
    starts = list(accumulate(lengths, initial=0))
    items: dict[Port, list[Any]] = {port: [] for port in ports}
    for sample, start in zip(samples, starts, strict=False):
        for item in sample.items:
            at = np.concatenate([np.arange(start + first, start + first + count) for first, count in item.spans])
            items[item.port].insert(0, (find_module(modalities, item.port).prepare(item.media), at, item.is_target))

    index = {
        port: torch.tensor(np.concatenate([np.zeros(0, np.int64), *(at for _, at, _ in placed)]))
        for port, placed in items.items()
    }
    is_predicted = {
        port: torch.tensor([is_target for _, at, is_target in placed for _ in at], dtype=torch.bool)
        for port, placed in items.items()
    }
    prepared = {port: [inputs for inputs, _, _ in own] for port, own in items.items()}
    transport = PackTransport(index, is_predicted=is_predicted)
    bounds = torch.tensor(starts, dtype=torch.int32)
    return {
        "input_ids": torch.from_numpy(np.concatenate([sample.input_ids for sample in samples])).long()[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "use_cache": False,
        "media": MediaBatch(prepared, transport, torch.device("cpu"), model.dtype),
    }


def labels_of(sample: RenderedRow) -> torch.Tensor:
    """Of the text, at the place before each target."""
    labels = np.where(sample.is_target, sample.input_ids, -100).astype(np.int64)
    return torch.from_numpy(np.append(labels[1:], -100))


def text_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


# The same row by Hugging Face's own processors and models


def written(family: str, row: dict[str, Any]) -> str:
    """A conversation as the family's chat template writes it, one mark for each item."""
    tokenizer = tokenizer_of(family)
    if family == "qwen2_audio":
        return str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
    text = ""
    for message in row["messages"]:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        inner = "".join(part["text"] if part["type"] == "text" else MARKS[family] for part in parts)
        text += f"<|im_start|>{message['role']}\n{inner}<|im_end|>\n"
    return text


def media_of(row: dict[str, Any]) -> list[tuple[str, Path, bool]]:
    """(modality, file, is it in an answer), in order."""
    return [
        (part["type"], DATA / part[part["type"]], message["role"] == "assistant")
        for message in row["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] != "text"
    ]


def processor_of(family: str) -> Any:
    """The published processor, with the sizes of the tiny model."""
    tokenizer, config = tokenizer_of(family), read_model_config(settings(family))
    if family in HEARING:
        bins = config.audio_config.num_mel_bins
        whisper = WhisperFeatureExtractor(feature_size=bins, chunk_length=2)
        if family == "qwen2_audio":
            return Qwen2AudioProcessor(whisper, tokenizer, chat_template=tokenizer.chat_template)
        if family == "audioflamingo3":
            return AudioFlamingo3Processor(WhisperFeatureExtractor(feature_size=bins, chunk_length=1), tokenizer)
        if family == "qwen3_asr":
            tokenizer.audio_token, tokenizer.audio_bos_token = "<|audio_pad|>", "<|audio_start|>"
            tokenizer.audio_eos_token = "<|audio_end|>"
            return Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(feature_size=bins), tokenizer)
        processor = VoxtralProcessor.__new__(VoxtralProcessor)  # its tokenizer needs a package of its own
        processor.feature_extractor = whisper
        return processor
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if family == "janus":
        tokenizer.image_token, tokenizer.boi_token = "<image_placeholder>", "<begin_of_image>"
        tokenizer.eoi_token = "<end_of_image>"
        images = JanusImageProcessorPil(size={"height": 32, "width": 32}, **half)
        return JanusProcessor(images, tokenizer, num_image_tokens=config.vision_config.num_image_tokens)
    tokenizer.image_token, tokenizer.image_token_id = "<image>", tokenizer.convert_tokens_to_ids("<image>")
    if family == "emu3":
        tokenizer.boi_token, tokenizer.eoi_token = "<|image start|>", "<|image end|>"
        tokenizer.image_wrapper_token, tokenizer.eof_token = "<|image token|>", "<|extra_201|>"
        tokenizer.bos_token = "<|endoftext|>"
        return Emu3Processor(Emu3ImageProcessor(min_pixels=256, max_pixels=1536, **half), tokenizer)
    tokenizer.sep_token = "<|endoftext|>"
    images = ChameleonImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return ChameleonProcessor(images, tokenizer, image_seq_length=16)


def theirs(family: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row as the processor hands it to the model."""
    processor, text, media = processor_of(family), written(family, row), media_of(row)
    ids = tokenizer_of(family)(text, add_special_tokens=False, return_tensors="pt")
    if not media:
        return dict(ids)
    if family in HEARING:
        sounds = [read_audio(Media("audio", path, {}), 16_000, 60.0) for _, path, _ in media]
        if family != "voxtral":
            by_sound = {"sampling_rate": 16_000} if family == "qwen2_audio" else {}
            return dict(processor(text=[text], audio=sounds, return_tensors="pt", **by_sound))
        window = 96 * 160
        given = {"padding": True, "truncation": False, "pad_to_multiple_of": window, "return_tensors": "pt"}
        features = processor._retrieve_input_features(sounds, 96, sampling_rate=16_000, **given)
        return {"input_features": features}  # of how many places there are, mistral-common decides
    pictures = [Image.open(path).convert("RGB") for _, path, _ in media]
    return dict(processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False))


def reference_loss(family: str, model: PreTrainedModel, sample: RenderedRow, row: dict[str, Any]) -> torch.Tensor:
    """Of one row, by transformers' own forward."""
    ids, labels = torch.from_numpy(sample.input_ids).long()[None], labels_of(sample)
    given = theirs(family, row)
    given = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in given.items()}
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if family in HEARING:
        return text_loss(model(**given).logits[0], labels)
    return drawing_loss(family, model, sample, row, given, labels)


def drawing_loss(
    family: str, model: Any, sample: RenderedRow, row: dict[str, Any], given: dict[str, Any], labels: torch.Tensor
) -> torch.Tensor:
    ids, pixels = given["input_ids"], given.get("pixel_values")
    learnt = [is_answer for _, _, is_answer in media_of(row)]
    places = [torch.arange(first, first + count) for item in sample.items for first, count in item.spans]
    codes: list[torch.Tensor] = []
    if family == "janus":
        embeddings = model.get_input_embeddings()(ids)
        for at, picture, is_answer in zip(places, pixels if learnt else [], learnt, strict=True):
            codes.append(model.model.vqmodel.encode(picture[None]).image_tokens)
            made = model.prepare_embeddings_for_image_generation(codes[-1])
            read = model.model.get_image_features(picture[None]).pooler_output
            embeddings = embeddings.index_put((torch.tensor([0]), at), made if is_answer else read.flatten(0, 1))
        hidden = model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state[0]
        logits, head = model.lm_head(hidden), model.model.generation_head
    else:
        for at, picture, number in zip(places, pixels if learnt else [], range(len(learnt)), strict=True):
            sizes = {"image_sizes": given["image_sizes"][number : number + 1]} if family == "emu3" else {}
            if sizes:  # pictures of a call are padded to the largest
                height, width = sizes["image_sizes"][0].tolist()
                picture = picture[:, :height, :width]
            codes.append(model.model.get_image_tokens(picture[None], **sizes).flatten().long())
            ids = ids.index_put((torch.tensor([0]), at), codes[-1])
        hidden = model.model(input_ids=ids, use_cache=False)[0][0]
        logits, head = model.lm_head(hidden), model.lm_head
    if family == "chameleon":  # as its forward does
        never = torch.zeros(logits.shape[-1], dtype=torch.bool)
        never[model.model.vocabulary_mapping.image_tokens] = True
        logits = logits.masked_fill(never, torch.finfo(logits.dtype).min)
    loss = text_loss(logits, labels)
    for at, code, is_answer in zip(places, codes, learnt, strict=True):
        loss = loss + (F.cross_entropy(head(hidden[at - 1]), code, reduction="sum") if is_answer else 0)
    return loss
