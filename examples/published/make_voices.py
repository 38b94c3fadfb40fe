"""Makes the rows and the tokenizer of families that hear or draw: `spoken.jsonl`, `drawn.jsonl`, `voices/`.

    python examples/published/make_voices.py examples/published/data

Pictures and sounds are those that make_rows.py made; it runs first. The result is in the repository.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from make_rows import CHAT_TEMPLATE, write_tokenizer

# Their ids are their places in this list; the models' configs have them, too.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "[BEGIN_AUDIO]", "[AUDIO]"]
SPECIAL += ["<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"]
SPECIAL += ["<begin_of_image>", "<image_placeholder>", "<end_of_image>"]
SPECIAL += ["<|image start|>", "<image>", "<|image token|>", "<|extra_200|>", "<|extra_201|>", "<|image end|>"]
SPECIAL += ["<racm3:break>", "<eoss>", "<sound>"]


def spoken(media: list[str], dice: random.Random, count: int) -> list[dict[str, Any]]:
    """Questions on none, one or two sounds."""
    written = []
    for number in range(count):
        names = dice.choices(media, k=dice.choice([0, 1, 1, 2]))
        parts: list[dict[str, str]] = [{"type": "audio", "audio": name} for name in names]
        question = "What is it?" if names else f"What is {number % 9} plus {number % 7}?"
        answer = f"{len(names)} sounds." if names else f"{number % 9 + number % 7}."
        content = [*parts, {"type": "text", "text": question}]
        written.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]})
    return written


def drawn(media: list[str], dice: random.Random, count: int) -> list[dict[str, Any]]:
    """Pictures to look at, pictures to draw, both, or neither."""
    written = []
    for number in range(count):
        kind = number % 4
        shown, made = dice.choice(media), dice.choice(media)
        question = [{"type": "image", "image": shown}] if kind in (0, 2) else []
        answer = [{"type": "image", "image": made}] if kind in (1, 2) else []
        said = {0: "What is this?", 1: "Draw a square.", 2: "Draw another one.", 3: f"Count to {number}."}[kind]
        content: list[dict[str, str]] = [*question, {"type": "text", "text": said}]
        reply: list[dict[str, str]] = [{"type": "text", "text": "Here: " if answer else "A square."}, *answer]
        written.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]})
    return written


def main(folder: Path) -> None:
    dice, texts = random.Random(0), []
    for name, make, kind in (("spoken", spoken, "audio*.flac"), ("drawn", drawn, "image*.png")):
        media = sorted(path.name for path in folder.glob(kind))
        lines = [json.dumps(row) for row in make(media, dice, 120)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        texts += lines
    write_tokenizer(folder / "voices", texts, SPECIAL, CHAT_TEMPLATE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
