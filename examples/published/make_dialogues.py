"""Makes the rows and the tokenizer of models that only speak: `dialogues.jsonl`, `dialogue0.npy`, `dialogues/`.

    python examples/published/make_dialogues.py examples/published/data

Sounds are those that make_rows.py made; it runs first. Codes follow from the letters of what is said, so that there is
something to learn. The result is in the repository.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from make_rows import write_tokenizer
from transformers import PreTrainedTokenizerFast

CODES, BOOKS = 64, 4
# Their ids are their places in this list; the model's config has them, too.
SPECIAL = ["<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>"]
LINES = ("Good morning.", "It is five.", "Who is there?", "A bell, I think.", "No, twice.", "Let us go.")
# As the published one, which takes contents as lists: each turn is its text, then what says it.
CHAT_TEMPLATE = """{%- for message in messages %}
    {{- bos_token + '[' + message['role'] + ']' + message['content'][0]['text'] + eos_token }}
    {%- if message['content'] | length > 1 %}{{- '<|AUDIO|><|audio_eos|>' }}{% endif %}
{%- endfor %}"""


def say(text: str, speaker: int) -> list[list[int]]:
    """A frame for every two letters; later codebooks refine the first. No code is 0: a frame of these is the end."""
    first = [(ord(letter) + 7 * speaker) % (CODES - 1) for letter in text[::2]]
    return [[(code * (book + 1) + book) % (CODES - 1) + 1 for book in range(BOOKS)] for code in first]


def dialogues(sounds: list[str], dice: random.Random, count: int, folder: Path) -> list[dict[str, Any]]:
    """One to three turns, said as a sound or as codes; some are only listened to."""
    written = []
    for number in range(count):
        messages = []
        for turn in range(1 + number % 3):
            text, speaker = dice.choice(LINES), turn % 2
            if number % 4 == 3:
                said: dict[str, Any] = {"type": "audio", "audio": dice.choice(sounds)}
            else:
                said = {"type": "audio", "codes": say(text, speaker)}
            if number == 0:  # codes may be in files
                np.save(folder / "dialogue0.npy", np.array(said["codes"], np.int16))
                said["codes"] = "dialogue0.npy"
            message = {"role": str(speaker), "content": [{"type": "text", "text": text}, said]}
            messages.append(message | ({"loss": False} if turn == 0 and number % 6 == 2 else {}))
        written.append({"messages": messages})
    return written


def main(folder: Path) -> None:
    sounds = sorted(path.name for path in folder.glob("audio*.flac"))
    rows = dialogues(sounds, random.Random(0), 96, folder)
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    (folder / "dialogues.jsonl").write_text("\n".join(lines) + "\n")
    write_tokenizer(folder / "dialogues", list(LINES), SPECIAL, CHAT_TEMPLATE)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "dialogues")
    tokenizer.bos_token, tokenizer.eos_token = SPECIAL[1:3]
    tokenizer.save_pretrained(folder / "dialogues")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
