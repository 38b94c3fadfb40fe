"""Inputs of the benchmark for all contestants: word tokenizer, documents, images, audio, and small random models.

Each word of the text is one token, so token counts follow from the text alone.
"""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MARKS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
MARKS += [f"<|{name}_{mark}|>" for name in ("image", "audio") for mark in ("begin", "end")] + ["<|audio_pad|>"]
SPECIAL = ["<pad>", "<eos>", "<unk>", *MARKS]
PAD, EOS = 0, 1
WORDS = ["user", "assistant", "system"]  # words of the chat template; those of documents follow
VOCABULARY = {"dense": 32_000, "moe": 32_000, "vlm": 32_000, "omni": 32_000, "dense_152k": 152_000}
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True}
PATCH, MERGED, PIXELS = 14, 2, {"min_pixels": 56 * 56, "max_pixels": 336 * 336}
SIDES = [112, 168, 224, 336]
TOWER = {
    "depth": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_heads": 4,
    "out_hidden_size": 512,
    "patch_size": PATCH,
    "spatial_merge_size": MERGED,
    "window_size": 112,
    "fullatt_block_indexes": [1, 3],
}
# Encoders of the composed model, for OmniZoo's config and for the loop in composed.py.
VISION = {
    "model_type": "siglip_vision_model",
    "image_size": 112,
    "patch_size": 14,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
AUDIO = {
    "model_type": "whisper",
    "num_mel_bins": 80,
    "max_source_positions": 300,  # 6 s
    "d_model": 256,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 768,
}
RATE = 16_000
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['role'] }} {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    " <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def make_assets(folder: Path, models: list[str], seed: int = 0) -> None:
    """Write a folder with weights, tokenizer and rows for each model. Complete folders are not written again."""
    for name in models:
        model_folder = folder / name
        if (model_folder / "complete").exists():
            continue
        model_folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(seed)
        word_tokenizer = tokenizer(VOCABULARY[name])
        word_tokenizer.save_pretrained(model_folder)
        writers: dict[str, Callable[..., dict[str, float]]] = {"vlm": write_image_chats, "omni": write_media_chats}
        stats = writers.get(name, write_text)(model_folder, VOCABULARY[name], seed)
        if name == "omni":
            Qwen3Config(vocab_size=VOCABULARY[name], **SHAPE).save_pretrained(model_folder)
        else:
            build(name, word_tokenizer).save_pretrained(model_folder)
        if name == "vlm":
            from transformers import Qwen2VLImageProcessor  # imported late: it warns if torchvision is missing

            processor = Qwen2VLImageProcessor(**PIXELS, patch_size=PATCH, merge_size=MERGED)
            processor.save_pretrained(model_folder)
        (model_folder / "stats.json").write_text(json.dumps(stats))
        (model_folder / "complete").touch()


def build(name: str, word_tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a model with random weights."""
    vocabulary = VOCABULARY[name]
    if name == "moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocabulary, **SHAPE, **EXPERTS))
    if name == "vlm":
        text = {key: value for key, value in SHAPE.items() if key != "head_dim"}
        rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0}
        marks = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
        marks |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
        config = Qwen2_5_VLConfig(
            text_config={"vocab_size": vocabulary, "rope_parameters": rope, **text},
            vision_config=TOWER,
            tie_word_embeddings=False,
            **{key: word_tokenizer.convert_tokens_to_ids(mark) for key, mark in marks.items()},
        )
        return Qwen2_5_VLForConditionalGeneration(config)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **SHAPE))


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per word."""
    first_words = [*SPECIAL, *WORDS]
    ids = {word: i for i, word in enumerate([*first_words, *(f"w{i}" for i in range(vocabulary - len(first_words)))])}
    words = Tokenizer(tokenizer_models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
    )


class Writer:
    """Generates random texts."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.rng, self.words = random.Random(seed), vocabulary - len(SPECIAL) - len(WORDS)

    def text(self, count: int) -> str:
        """Return a text of `count` words, in which some words are frequent."""
        return " ".join(f"w{int(self.rng.random() ** 3 * self.words)}" for _ in range(count))

    def length(self, median: int, minimum: int, maximum: int) -> int:
        """Return a length from a lognormal distribution, within limits."""
        return int(min(maximum, max(minimum, self.rng.lognormvariate(math.log(median), 0.7))))


def write_rows(path: Path, rows: list[Any]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_text(folder: Path, vocabulary: int, seed: int, documents: int = 2000) -> dict[str, float]:
    """Write `text.jsonl`, and `asked.jsonl` with the first tenth of each text as prompt, for trainers that need one.

    Returns the mean number of attended tokens, and the fraction of image tokens, for `limit.py`.
    """
    writer, texts, lengths = Writer(vocabulary, seed), [], []
    for _ in range(documents):
        lengths.append(writer.length(280, 50, 1023))
        texts.append(writer.text(lengths[-1]))
    write_rows(folder / "text.jsonl", [{"text": text} for text in texts])
    prompted = []
    for text in texts:
        words = text.split(" ")
        first = max(1, len(words) // 10)
        prompted.append({"instruction": " ".join(words[:first]), "output": " ".join(words[first:])})
    write_rows(folder / "asked.jsonl", prompted)
    return {"context": sum(n * n for n in lengths) / sum(lengths) / 2, "pictured": 0.0}


def write_image_chats(folder: Path, vocabulary: int, seed: int, rows: int = 400) -> dict[str, float]:
    """Write `chat.jsonl`: rows with an image of one of 16 sizes, a prompt and a response. Returns as `write_text`."""
    writer, noise = Writer(vocabulary, seed), np.random.default_rng(seed)
    (folder / "pictures").mkdir(exist_ok=True)
    chats, lengths, num_placeholders = [], [], 0
    for number in range(rows):
        height, width = writer.rng.choice(SIDES), writer.rng.choice(SIDES)
        write_image(folder / "pictures" / f"{number}.png", height, width, noise)
        prompt_words = writer.rng.randint(5, 30)
        response_words = writer.length(150, 30, 700)
        messages = [
            {"role": "user", "content": "<image>" + writer.text(prompt_words)},
            {"role": "assistant", "content": writer.text(response_words)},
        ]
        chats.append({"messages": messages, "images": [f"pictures/{number}.png"]})
        image_tokens = height * width // (PATCH * MERGED) ** 2
        num_placeholders += image_tokens
        lengths.append(prompt_words + response_words + image_tokens + 8)
    write_rows(folder / "chat.jsonl", chats)
    # LLaMA-Factory does not resolve relative paths.
    write_rows(
        folder / "chat_absolute.jsonl", [row | {"images": [str(folder.resolve() / row["images"][0])]} for row in chats]
    )
    return {"context": sum(n * n for n in lengths) / sum(lengths) / 2, "pictured": num_placeholders / sum(lengths)}


def write_media_chats(folder: Path, vocabulary: int, seed: int, rows: int = 400) -> dict[str, float]:
    """Write `chat.jsonl`: rows with an image, 1 to 6 seconds of audio, or both, a prompt and a response.

    Returns no statistics.
    """
    import soundfile

    writer, noise = Writer(vocabulary, seed), np.random.default_rng(seed)
    chats = []
    for subfolder in ("pictures", "sounds"):
        (folder / subfolder).mkdir(exist_ok=True)
    for number in range(rows):
        kinds = writer.rng.choice([("image",), ("audio",), ("image", "audio")])
        row: dict[str, Any] = {}
        if "image" in kinds:
            write_image(
                folder / "pictures" / f"{number}.png", writer.rng.choice(SIDES), writer.rng.choice(SIDES), noise
            )
            row["images"] = [f"pictures/{number}.png"]
        if "audio" in kinds:
            wave = 0.1 * noise.standard_normal(int(writer.rng.uniform(1, 6) * RATE)).astype(np.float32)
            soundfile.write(folder / "sounds" / f"{number}.flac", wave, RATE)
            row["audios"] = [f"sounds/{number}.flac"]
        tags = "".join(f"<{kind}>" for kind in kinds)
        prompt = tags + writer.text(writer.rng.randint(5, 30))
        response = writer.text(writer.length(150, 30, 700))
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        chats.append({"messages": messages, **row})
    write_rows(folder / "chat.jsonl", chats)
    return {}


def write_image(path: Path, height: int, width: int, noise: np.random.Generator) -> None:
    """Write an image of coarse random noise."""
    coarse = noise.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((width, height)).save(path)
