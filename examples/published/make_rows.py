"""Write `examples/published/data`: images of colored squares, tones, videos of a moving square (some with a tone), and
chat rows about them.

    python examples/published/make_rows.py examples/published/data

The files are in the repository, so the examples run on a fresh clone. This script documents how they were generated.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

COLORS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
TONES = {"low": 220, "middle": 440, "high": 880}
DIRECTIONS = {"left": -1, "right": 1}
RATE = 8000  # audio samples per second
FPS = 8
# A token's id is its index in this list. The configs of the models contain these ids.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"]
# Some families spell these tokens differently, so they have separate tokenizers.
SPELLINGS = {
    "tokenizer_qwen2_5_omni": "vision_bos vision_eos IMAGE VIDEO audio_bos AUDIO audio_eos",
    "tokenizer_glm4v": "begin_of_image end_of_image image video begin_of_video end_of_video",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def canvas(height: int, width: int, color: str, left: int) -> np.ndarray[Any, Any]:
    """Return an image, [height, width, 3], of a colored rectangle at column `left`."""
    left = max(left, 0)
    pixels = np.full((height, width, 3), 245, np.uint8)
    pixels[height // 4 : 3 * height // 4, left : left + width // 4] = COLORS[color]
    return pixels


def write_image(folder: Path, rng: random.Random, number: int) -> tuple[str, str]:
    """Write an image; return its file name and description."""
    color = rng.choice(list(COLORS))
    height, width = rng.choice([(32, 32), (40, 72), (96, 48), (64, 64)])
    name = f"image{number}.png"
    Image.fromarray(canvas(height, width, color, rng.randrange(width // 2))).save(folder / name)
    return name, f"a {color} square"


def write_audio(folder: Path, rng: random.Random, number: int) -> tuple[str, str]:
    """Write a tone; return its file name and description."""
    tone = rng.choice(list(TONES))
    seconds = rng.choice([0.4, 0.9, 1.2, 1.6])
    wave = 0.3 * np.sin(2 * np.pi * TONES[tone] * np.arange(int(seconds * RATE)) / RATE)
    name = f"audio{number}.flac"
    soundfile.write(folder / name, wave.astype(np.float32), RATE)
    return name, f"a {tone} tone"


def write_video(folder: Path, rng: random.Random, number: int) -> tuple[str, str]:
    """Write a video of a moving square; return its file name and description."""
    color = rng.choice(list(COLORS))
    direction = rng.choice(list(DIRECTIONS))
    frames = rng.choice([8, 16, 24])
    name = f"video{number}.mp4"
    with av.open(str(folder / name), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for step in range(frames):
            pixels = canvas(48, 64, color, 24 + DIRECTIONS[direction] * step)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return name, f"a {color} square that moves {direction}"


def write_video_with_audio(folder: Path, rng: random.Random, number: int) -> tuple[str, str]:
    """Write a video with an audio track; return its file name and description."""
    color = rng.choice(list(COLORS))
    tone = rng.choice(list(TONES))
    frames = rng.choice([8, 16])
    name = f"scene{number}.mp4"
    with av.open(str(folder / name), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        track = container.add_stream("aac", rate=16_000)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for step in range(frames):
            pixels = canvas(48, 64, color, 8 + step)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
        wave = 0.3 * np.sin(2 * np.pi * TONES[tone] * np.arange(frames * 16_000 // FPS)[None] / 16_000)
        audio = av.AudioFrame.from_ndarray(wave.astype(np.float32), format="fltp", layout="mono")
        audio.sample_rate = 16_000
        container.mux(track.encode(audio))
        container.mux(track.encode())
    return name, f"a {color} square and a {tone} tone"


def chat_rows(media: dict[str, list[tuple[str, str]]], rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return rows about the media items: half with content parts, half with tags and columns; a fourth without media.

    `media` has the file names and descriptions of each modality.
    """
    rows = []
    for number in range(count):
        kinds = [] if number % 4 == 3 else rng.choices(list(media), k=rng.choice([1, 1, 2]))
        items = [(kind, *rng.choice(media[kind])) for kind in kinds]
        a = rng.randrange(9)
        b = rng.randrange(9)
        question = "What is there?" if items else f"What is {a} plus {b}?"
        answer = " and ".join(description for _, _, description in items) or f"{a + b}"
        if number % 2:
            content: Any = [{"type": kind, kind: name} for kind, name, _ in items]
            content.append({"type": "text", "text": question})
            columns = {}
        else:
            content = "".join(f"<{kind}>" for kind in kinds) + question
            columns = {f"{kind}s": [name for k, name, _ in items if k == kind] for kind in kinds}
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": f"{answer}."}]
        rows.append({"messages": messages, **columns})
    return rows


def with_video_audio(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with `use_audio_in_video` set for its videos."""
    content = row["messages"][0]["content"]
    if isinstance(content, list):
        content = [part | ({"use_audio_in_video": True} if part["type"] == "video" else {}) for part in content]
        return row | {"messages": [row["messages"][0] | {"content": content}, *row["messages"][1:]]}
    videos = [{"path": name, "use_audio_in_video": True} for name in row.get("videos", [])]
    return row | ({"videos": videos} if videos else {})


def write_tokenizer(
    folder: Path, texts: list[str], special: list[str] = SPECIAL, chat_template: str = CHAT_TEMPLATE
) -> None:
    """Train a byte-level BPE tokenizer on `texts` and save it with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=special[1:],
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    media = {}
    for kind, write in {"image": write_image, "video": write_video, "audio": write_audio}.items():
        media[kind] = [write(folder, rng, number) for number in range(8)]
    visual = {kind: items for kind, items in media.items() if kind != "audio"}

    texts = []
    for name, items in {"rows": media, "visual": visual}.items():
        lines = [json.dumps(row) for row in chat_rows(items, rng, 200)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        texts += lines
    write_tokenizer(folder / "tokenizer", texts)
    for name, spellings in SPELLINGS.items():
        special = [*SPECIAL[:3], *(f"<|{spelling}|>" for spelling in spellings.split())]
        write_tokenizer(folder / name, texts, special)

    rng = random.Random(1)
    scenes = {**media, "video": [write_video_with_audio(folder, rng, number) for number in range(6)]}
    lines = []
    for row in chat_rows(scenes, rng, 120):
        lines.append(json.dumps(with_video_audio(row) if rng.random() < 0.75 else row))
    (folder / "scenes.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
