"""Makes what the vision examples read besides the pictures of make_rows.py: questions on them, and tokenizers with the
marks of all these families.

    python examples/published/make_vision.py examples/published/data

The result is in the repository, so that the examples run on a fresh clone; this script says where it came from.
"""

import json
import random
import sys
from pathlib import Path

from make_rows import draw, rows, write_tokenizer

# Their ids are their places in this list; the models' configs have them, too.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]  # 3: Gemma 3
SPECIAL += ["<img>", "<IMG_CONTEXT>", "</img>"]  # 6: InternVL
SPECIAL += ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]  # 9: Mistral 3
SPECIAL += ["<|image_start|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]  # 12: Llama 4
SPECIAL += ["<|image_end|>"]
SPECIAL += ["<|image>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>"]  # 18: Gemma 4, with <|image|>
SPECIAL += ["<image>"]  # 24: LLaVA
# Came later: in a tokenizer of its own, others stay as they are.
KIMI = [*SPECIAL[:3], "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]  # 3
MINICPM = [*SPECIAL[:3], "<image>", "</image>", "<slice>", "</slice>"]  # 3
MINICPM += ["<image_id>", "</image_id>", "<|image_pad|>"]  # 7


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)
    pictures = [draw(folder, dice, number) for number in range(8)]  # the same ones again
    sounds = [(f"audio{number}.flac", "a tone") for number in range(8)]
    texts = []
    for name, made in {"pictures": {"image": pictures}, "heard": {"image": pictures, "audio": sounds}}.items():
        lines = [json.dumps(row) for row in rows(made, random.Random(1), 120)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        texts += lines
    write_tokenizer(folder / "vision", texts, SPECIAL)
    write_tokenizer(folder / "vision_kimi", texts, KIMI)
    write_tokenizer(folder / "vision_minicpm", texts, MINICPM)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
