"""Write the rows of the vision examples, which use the images of make_rows.py, and tokenizers with the special tokens
of all these families.

    python examples/published/make_vision.py examples/published/data

The files are in the repository, so the examples run on a fresh clone. This script documents how they were generated.
"""

import json
import random
import sys
from pathlib import Path

from make_rows import chat_rows, write_image, write_tokenizer

# A token's id is its index in this list. The configs of the models contain these ids.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]  # 3: Gemma 3
SPECIAL += ["<img>", "<IMG_CONTEXT>", "</img>"]  # 6: InternVL
SPECIAL += ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]  # 9: Mistral 3
SPECIAL += ["<|image_start|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]  # 12: Llama 4
SPECIAL += ["<|image_end|>"]
SPECIAL += ["<|image>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>"]  # 18: Gemma 4, with <|image|>
SPECIAL += ["<image>"]  # 24: LLaVA
# Families that were added later have separate tokenizers, so the ids of the others do not change.
KIMI = [*SPECIAL[:3], "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]  # 3
MINICPM = [*SPECIAL[:3], "<image>", "</image>", "<slice>", "</slice>"]  # 3
MINICPM += ["<image_id>", "</image_id>", "<|image_pad|>"]  # 7


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    images = [write_image(folder, rng, number) for number in range(8)]  # the same files as make_rows.py writes
    audio = [(f"audio{number}.flac", "a tone") for number in range(8)]
    texts = []
    for name, media in {"pictures": {"image": images}, "heard": {"image": images, "audio": audio}}.items():
        lines = [json.dumps(row) for row in chat_rows(media, random.Random(1), 120)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        texts += lines
    write_tokenizer(folder / "vision", texts, SPECIAL)
    write_tokenizer(folder / "vision_kimi", texts, KIMI)
    write_tokenizer(folder / "vision_minicpm", texts, MINICPM)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
