"""Makes `examples/published/data`: pictures of coloured squares, tones, clips of a moving square (some with a tone),
questions on them.

    python examples/published/make_rows.py examples/published/data

The result is in the repository, so that the example runs on a fresh clone; this script says where it came from.
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

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 60), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
TONES = {"low": 220, "middle": 440, "high": 880}
DIRECTIONS = {"left": -1, "right": 1}
RATE, FPS = 8000, 8
# Their ids are their places in this list; the models' configs have them, too.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"]
# Families that spell them otherwise have tokenizers of their own.
SPELLINGS = {
    "tokenizer_qwen2_5_omni": "vision_bos vision_eos IMAGE VIDEO audio_bos AUDIO audio_eos",
    "tokenizer_glm4v": "begin_of_image end_of_image image video begin_of_video end_of_video",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def canvas(height: int, width: int, color: str, at: int) -> np.ndarray[Any, Any]:
    pixels = np.full((height, width, 3), 245, np.uint8)
    pixels[height // 4 : 3 * height // 4, max(at, 0) : max(at, 0) + width // 4] = COLOURS[color]
    return pixels


def draw(folder: Path, dice: random.Random, number: int) -> tuple[str, str]:
    color, (height, width) = dice.choice(list(COLOURS)), dice.choice([(32, 32), (40, 72), (96, 48), (64, 64)])
    name = f"image{number}.png"
    Image.fromarray(canvas(height, width, color, dice.randrange(width // 2))).save(folder / name)
    return name, f"a {color} square"


def play(folder: Path, dice: random.Random, number: int) -> tuple[str, str]:
    tone, seconds = dice.choice(list(TONES)), dice.choice([0.4, 0.9, 1.2, 1.6])
    wave = 0.3 * np.sin(2 * np.pi * TONES[tone] * np.arange(int(seconds * RATE)) / RATE)
    name = f"audio{number}.flac"
    soundfile.write(folder / name, wave.astype(np.float32), RATE)
    return name, f"a {tone} tone"


def film(folder: Path, dice: random.Random, number: int) -> tuple[str, str]:
    color, direction, frames = dice.choice(list(COLOURS)), dice.choice(list(DIRECTIONS)), dice.choice([8, 16, 24])
    name = f"video{number}.mp4"
    with av.open(str(folder / name), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for step in range(frames):
            at = 24 + DIRECTIONS[direction] * step
            container.mux(stream.encode(av.VideoFrame.from_ndarray(canvas(48, 64, color, at), format="rgb24")))
        container.mux(stream.encode())
    return name, f"a {color} square that moves {direction}"


def stage(folder: Path, dice: random.Random, number: int) -> tuple[str, str]:
    """A clip with its own sound."""
    color, tone, frames = dice.choice(list(COLOURS)), dice.choice(list(TONES)), dice.choice([8, 16])
    name = f"scene{number}.mp4"
    with av.open(str(folder / name), "w") as container:
        stream, track = container.add_stream("mpeg4", rate=FPS), container.add_stream("aac", rate=16_000)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for step in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(canvas(48, 64, color, 8 + step), format="rgb24")))
        container.mux(stream.encode())
        wave = 0.3 * np.sin(2 * np.pi * TONES[tone] * np.arange(frames * 16_000 // FPS)[None] / 16_000)
        heard = av.AudioFrame.from_ndarray(wave.astype(np.float32), format="fltp", layout="mono")
        heard.sample_rate = 16_000
        container.mux(track.encode(heard))
        container.mux(track.encode())
    return name, f"a {color} square and a {tone} tone"


def rows(made: dict[str, list[tuple[str, str]]], dice: random.Random, count: int) -> list[dict[str, Any]]:
    """Half as messages with parts, half with tags and columns; every fourth without media."""
    written = []
    for number in range(count):
        kinds = [] if number % 4 == 3 else dice.choices(list(made), k=dice.choice([1, 1, 2]))
        items = [(kind, *dice.choice(made[kind])) for kind in kinds]
        a, b = dice.randrange(9), dice.randrange(9)
        question = "What is there?" if items else f"What is {a} plus {b}?"
        answer = " and ".join(what for _, _, what in items) or f"{a + b}"
        if number % 2:
            content: Any = [{"type": kind, kind: name} for kind, name, _ in items] + [
                {"type": "text", "text": question}
            ]
            columns = {}
        else:
            content = "".join(f"<{kind}>" for kind in kinds) + question
            columns = {f"{kind}s": [name for k, name, _ in items if k == kind] for kind in kinds}
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": f"{answer}."}]
        written.append({"messages": messages, **columns})
    return written


def with_sound(row: dict[str, Any]) -> dict[str, Any]:
    """The same row, whose clips are heard, too."""
    content = row["messages"][0]["content"]
    if isinstance(content, list):
        content = [part | ({"use_audio_in_video": True} if part["type"] == "video" else {}) for part in content]
        return row | {"messages": [row["messages"][0] | {"content": content}, *row["messages"][1:]]}
    heard = [{"path": name, "use_audio_in_video": True} for name in row.get("videos", [])]
    return row | ({"videos": heard} if heard else {})


def write_tokenizer(
    folder: Path, texts: list[str], special: list[str] = SPECIAL, chat_template: str = CHAT_TEMPLATE
) -> None:
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
    dice = random.Random(0)
    makers = {"image": draw, "video": film, "audio": play}
    made = {kind: [make(folder, dice, number) for number in range(8)] for kind, make in makers.items()}
    visual = {kind: items for kind, items in made.items() if kind != "audio"}
    texts = []
    for name, items in {"rows": made, "visual": visual}.items():
        lines = [json.dumps(row) for row in rows(items, dice, 200)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        texts += lines
    write_tokenizer(folder / "tokenizer", texts)
    for name, marks in SPELLINGS.items():
        write_tokenizer(folder / name, texts, [*SPECIAL[:3], *(f"<|{mark}|>" for mark in marks.split())])
    dice = random.Random(1)
    scenes = {**made, "video": [stage(folder, dice, number) for number in range(6)]}
    lines = [json.dumps(with_sound(row) if dice.random() < 0.75 else row) for row in rows(scenes, dice, 120)]
    (folder / "scenes.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
