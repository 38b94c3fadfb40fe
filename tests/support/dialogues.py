"""A tiny model that only speaks: rows of the example as packs of ours, and as Hugging Face takes them."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from published import DTYPE
from transformers import CsmForConditionalGeneration, CsmProcessor, EncodecFeatureExtractor, PreTrainedTokenizerFast
from voices import DATA, ROOT

from omnizoo.config.load import load_config
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.sample import RenderedRow
from omnizoo.data.sources.base import MediaFolder
from omnizoo.modalities.files.audio import read_audio
from omnizoo.modalities.media import Media
from omnizoo.models.build import build_model
from omnizoo.models.hf_private import PACKED
from omnizoo.models.media.hf_model import media_model
from omnizoo.models.read_config import read_model_config
from omnizoo.recipes.csm import RECIPE

RATE, BOOKS, SOUND, END = 24_000, 4, 3, 4  # SOUND, END: ids of tokens


def settings(**options: Any) -> ModelSection:
    """Of the example; tests run where its paths begin."""
    spec = load_config(ROOT / "examples/published/csm.yaml", []).model
    decoder = spec.modalities["audio"].decoder
    assert decoder is not None
    decoder.options.update(options)
    return spec


@cache
def tiny_model(precision: str) -> Any:
    config = read_model_config(settings())
    torch.manual_seed(0)
    model = CsmForConditionalGeneration._from_config(config, dtype=DTYPE[precision])
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # far enough from zero that every path matters
            if not name.startswith("codec_model"):
                parameter.normal_(0, 0.2) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("embed_sum"):  # else every frame is nearest to one code
                buffer.normal_(0, 0.1)
    model.codec_model.requires_grad_(False)
    return model.eval()


def ours(precision: str, **options: Any) -> Any:
    """The model as `parallelize` leaves it on one rank."""
    model = deepcopy(tiny_model(precision))
    model.set_attn_implementation(PACKED)
    media_model(model).attach(settings(**options))
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(DATA / "dialogues")


def renderer(seed: int = 0, **options: Any) -> Renderer:
    """By modalities on a copy without weights, as loaders have them."""
    spec = settings(**options)
    modalities = media_model(build_model(spec, "fp32")).modalities(spec)
    return Renderer(tokenizer(), False, modalities, seed=seed, turns=RECIPE.speaker_format)


def rows(*numbers: int) -> list[dict[str, Any]]:
    lines = (DATA / "dialogues.jsonl").read_text().splitlines()
    return [json.loads(lines[number]) for number in numbers]


def read(row: dict[str, Any], reader: Renderer, folder: Path = DATA) -> RenderedRow:
    return reader.render(row, find=MediaFolder(folder, None).find)


# The same row by Hugging Face's own processor and model


def processor() -> CsmProcessor:
    own = tokenizer()
    extractor = EncodecFeatureExtractor(sampling_rate=RATE)
    return CsmProcessor(extractor, own, chat_template=own.chat_template)


def waves_of(row: dict[str, Any]) -> list[Any]:
    parts = [part for message in row["messages"] for part in message["content"]]
    names = [part["audio"] for part in parts if "audio" in part]
    return [read_audio(Media("audio", DATA / name, {}), RATE, 60.0) for name in names]


def theirs(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose sounds are files, as the processor hands it to the model."""
    own = processor()
    text = own.apply_chat_template(row["messages"], tokenize=False)
    return dict(own(text=text, audio=waves_of(row) or None, output_labels=True))


def reference(model: Any, row: dict[str, Any], sample: RenderedRow, refined: list[Any] | None = None) -> Any:
    """What transformers' own forward gives of one row, with the labels that its processor makes; of messages that are
    not learnt they are taken out. `refined`: of each item, which of its frames the depth decoder learns from."""
    ids = torch.from_numpy(sample.input_ids).long()[None]
    is_frame = (ids == SOUND) | (ids == END)
    labels = torch.where(is_frame, ids, -100)
    for number, item in enumerate(sample.items):
        ((first, count),) = item.spans
        if refined is not None:
            labels[0, first : first + count][refined[number] == 0] = -101
        if not item.is_target:
            labels[0, first : first + count] = -100
    common = {"attention_mask": torch.ones_like(ids), "use_cache": False}
    if waves_of(row):
        given = theirs(row)
        sounds = {"input_values": given["input_values"].to(model.dtype)}
        cuts = {"input_values_cutoffs": given["input_values_cutoffs"]}
        return model(input_ids=ids, labels=labels, **sounds, **cuts, **common)
    # Its processor knows no codes: they are put where it would put those of a sound.
    frames = torch.cat([torch.from_numpy(codes_of(item.media)) for item in sample.items])
    values = torch.where(is_frame[..., None], 0, labels[..., None]).repeat(1, 1, BOOKS)
    values[is_frame] = frames
    values[labels == -100] = -100
    embeddings = model.embed_text_tokens(ids)
    embeddings[is_frame] = model.backbone_model.embed_tokens(frames[None])[0]
    return model(inputs_embeds=embeddings, labels=values, **common)


def codes_of(media: Media) -> Any:
    """The frames of an item given as codes, and the end."""
    codes = np.load(media.value) if isinstance(media.value, Path) else np.array(media.value)
    return np.concatenate([codes, np.zeros((1, BOOKS), np.int64)]).astype(np.int64)


def publish(folder: Path) -> Any:
    """A folder as the family is published in."""
    model = deepcopy(tiny_model("fp32"))
    for settings_ in (model.generation_config, model.depth_decoder.generation_config):
        settings_._from_model_config = False  # of one made from the config of a model, transformers reads no more
    model.depth_decoder.generation_config.temperature = 0.9  # kept in the file of the whole model
    model.depth_decoder.generation_config.do_sample = True
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return model
