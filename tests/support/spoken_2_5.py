"""The talker of Qwen2.5-Omni by Hugging Face's own forward, frame by frame with a cache, as its `generate` calls it:
what tests compare with. And rows for the tiny model of examples/published/qwen2_5_omni_talker.yaml."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import soundfile
import torch
import torch.nn.functional as F
from published import generation_inputs
from safetensors.numpy import load_file
from spoken import DATA, media_of, say
from transformers import DynamicCache

from omnizoo.modalities.base import Modality, find_module
from omnizoo.modalities.item import MediaItem

VOICES = DATA / "spk_dict.safetensors"
ASSISTANT = (1, 314)  # <|im_start|>, assistant
END_OF_TURN = 2


@cache
def rows() -> list[dict[str, Any]]:
    """Of the example, but for sounds of less than a second, as in spoken.py; and conversations of several turns, some
    of them spoken."""
    found = [json.loads(line) for line in (DATA / "one_codebook.jsonl").read_text().splitlines()]
    long = {file.name for file in DATA.glob("*.flac") if soundfile.info(file).duration > 1}
    found = [row for row in found if all(kind != "audio" or file in long for kind, file in media_of(row))]
    picture = [{"type": "image", "image": "image1.png"}, {"type": "text", "text": "And here?"}]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is there?"},
        say("red.", [1, 5], "ben"),
        {"role": "user", "content": picture},
        say("a very long answer to that.", [[63 - i] for i in range(20)], "ada"),
        {"role": "user", "content": "Thanks."},
        say("yes.", [9], "ben"),
    ]
    silent = [*turns[:2], {"role": "assistant", "content": "no."}, *turns[3:5]]
    clips = [row for row in found if any(kind == "video" for kind, _ in media_of(row))]
    return [{"messages": turns}, {"messages": silent}] * 2 + clips[:6] + found[:30]


def inputs_of(
    model: Any, ids: Sequence[int], items: Sequence[MediaItem], modalities: Mapping[str, Modality]
) -> dict[str, Any]:
    """A conversation as Hugging Face's processors hand it to the model."""
    read = [item for item in items if item.answer is None]
    prepared = [replace(item, inputs=find_module(modalities, item.port).prepare(item.media)) for item in read]
    inputs = generation_inputs(model, list(ids), prepared)
    return {
        name: value.to(model.dtype) if is_float(value) and "second" not in name else value
        for name, value in inputs.items()
    }


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def speech_loss(
    model: Any, out: Any, inputs: dict[str, Any], number: int, codes: torch.Tensor, speaker: str
) -> torch.Tensor:
    """The sum over frames and the end, of one of the assistant's messages in a conversation that the thinker has read
    (`out`, with its hidden states)."""
    config, talker, ids = model.config, model.talker, inputs["input_ids"]
    settings, thinker = config.talker_config, config.thinker_config
    begins = (ids[0, :-1] == ASSISTANT[0]) & (ids[0, 1:] == ASSISTANT[1])
    start = int(begins.nonzero().flatten()[number]) + 3
    end = start + int((ids[0, start:] == END_OF_TURN).nonzero()[0])
    media = (thinker.audio_token_index, thinker.image_token_index, thinker.video_token_index)
    is_media = sum(ids == id for id in media) > 0
    embed = torch.where(is_media[..., None], torch.zeros_like(out.hidden_states[0]), out.hidden_states[0])
    both = (embed + out.hidden_states[-1])[:, :end]
    voice = int(load_file(VOICES)[f"{speaker}.bos_token"][0])
    table = model.thinker.get_input_embeddings()
    mark, last, pad = (
        table(torch.tensor([[id]])) for id in (voice, settings.tts_text_end_token_id, settings.tts_text_pad_token_id)
    )
    prompt = torch.cat([both[:, :start], mark, both[:, start : start + 1]], 1)
    reply = torch.cat([both[:, start + 1 :], last, pad], 1)
    text_ids = torch.cat([ids[:, :start], torch.tensor([[voice]]), ids[:, start : start + 1]], 1)
    about = ("image_grid_thw", "video_grid_thw", "video_second_per_grid", "use_audio_in_video")
    told = {name: inputs[name] for name in about if name in inputs}
    if "feature_attention_mask" in inputs:
        told["audio_feature_lengths"] = inputs["feature_attention_mask"].sum(1)
    logits: list[torch.Tensor] = []  # not those of the output, which are fp32
    handle = talker.codec_head.register_forward_hook(lambda module, args, out: logits.append(out[0, -1]))
    cache = DynamicCache(config=settings)
    mask = torch.ones(1, prompt.shape[1], dtype=torch.long)
    try:
        kept = {"use_cache": True, "past_key_values": cache}
        talker(inputs_embeds=prompt, input_text_ids=text_ids, attention_mask=mask, **kept, **told)
        for code in codes.flatten():
            mask = torch.cat([mask, mask[:, :1]], 1)
            step = talker(input_ids=code.view(1, 1), attention_mask=mask, thinker_reply_part=reply, **kept)
            reply = step.thinker_reply_part
    finally:
        handle.remove()
    wanted = torch.cat([codes.flatten(), torch.tensor([settings.tts_codec_end_token_id])])
    return F.cross_entropy(torch.stack(logits), wanted, reduction="sum")
