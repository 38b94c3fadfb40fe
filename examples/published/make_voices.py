"""Write rows and tokenizer of families with audio input or image output: `spoken.jsonl`, `drawn.jsonl`, `voices/`.

    python examples/published/make_voices.py examples/published/data

Run make_rows.py first: it writes the images and audio files. The files are in the repository.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from make_rows import CHAT_TEMPLATE, write_tokenizer

# A token's id is its index in this list. The configs of the models contain these ids.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "[BEGIN_AUDIO]", "[AUDIO]"]
SPECIAL += ["<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"]
SPECIAL += ["<begin_of_image>", "<image_placeholder>", "<end_of_image>"]
SPECIAL += ["<|image start|>", "<image>", "<|image token|>", "<|extra_200|>", "<|extra_201|>", "<|image end|>"]
SPECIAL += ["<racm3:break>", "<eoss>", "<sound>"]


def audio_rows(media: list[str], rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return rows with zero to two audio files in the prompt."""
    rows = []
    for number in range(count):
        names = rng.choices(media, k=rng.choice([0, 1, 1, 2]))
        parts: list[dict[str, str]] = [{"type": "audio", "audio": name} for name in names]
        question = "What is it?" if names else f"What is {number % 9} plus {number % 7}?"
        answer = f"{len(names)} sounds." if names else f"{number % 9 + number % 7}."
        content = [*parts, {"type": "text", "text": question}]
        rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]})
    return rows


def image_rows(media: list[str], rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return rows with images in the prompt, in the response, in both, or in neither."""
    rows = []
    for number in range(count):
        kind = number % 4
        input_image = rng.choice(media)
        output_image = rng.choice(media)
        input_parts = [{"type": "image", "image": input_image}] if kind in (0, 2) else []
        output_parts = [{"type": "image", "image": output_image}] if kind in (1, 2) else []
        prompt = {0: "What is this?", 1: "Draw a square.", 2: "Draw another one.", 3: f"Count to {number}."}[kind]
        content: list[dict[str, str]] = [*input_parts, {"type": "text", "text": prompt}]
        response_text = "Here: " if output_parts else "A square."
        reply: list[dict[str, str]] = [{"type": "text", "text": response_text}, *output_parts]
        rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]})
    return rows


def main(folder: Path) -> None:
    rng = random.Random(0)
    texts = []
    for name, make_rows, pattern in (("spoken", audio_rows, "audio*.flac"), ("drawn", image_rows, "image*.png")):
        media = sorted(path.name for path in folder.glob(pattern))
        lines = [json.dumps(row) for row in make_rows(media, rng, 120)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        texts += lines
    write_tokenizer(folder / "voices", texts, SPECIAL, CHAT_TEMPLATE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
