"""Write rows and tokenizer of models that only generate speech: `dialogues.jsonl`, `dialogue0.npy`, `dialogues/`.

    python examples/published/make_dialogues.py examples/published/data

Run make_rows.py first: it writes the audio files. Codes are a function of the letters of the text, so a model can learn
them. The files are in the repository.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from make_rows import write_tokenizer
from transformers import PreTrainedTokenizerFast

CODES = 64
CODEBOOKS = 4
# A token's id is its index in this list. The config of the model contains these ids.
SPECIAL = ["<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>"]
LINES = ("Good morning.", "It is five.", "Who is there?", "A bell, I think.", "No, twice.", "Let us go.")
# Like the published template, it expects contents as lists: the text of a turn, then its audio.
CHAT_TEMPLATE = """{%- for message in messages %}
    {{- bos_token + '[' + message['role'] + ']' + message['content'][0]['text'] + eos_token }}
    {%- if message['content'] | length > 1 %}{{- '<|AUDIO|><|audio_eos|>' }}{% endif %}
{%- endfor %}"""


def encode_speech(text: str, speaker: int) -> list[list[int]]:
    """Return codes, [frames, codebooks], one frame per two letters. No code is 0: a frame of zeros ends the audio."""
    first_codes = [(ord(letter) + 7 * speaker) % (CODES - 1) for letter in text[::2]]
    return [[(code * (book + 1) + book) % (CODES - 1) + 1 for book in range(CODEBOOKS)] for code in first_codes]


def dialogues(audio_files: list[str], rng: random.Random, count: int, folder: Path) -> list[dict[str, Any]]:
    """Return rows of one to three turns with audio files or codes. Some turns are not targets."""
    rows = []
    for number in range(count):
        messages = []
        for turn in range(1 + number % 3):
            text = rng.choice(LINES)
            speaker = turn % 2
            if number % 4 == 3:
                audio: dict[str, Any] = {"type": "audio", "audio": rng.choice(audio_files)}
            else:
                audio = {"type": "audio", "codes": encode_speech(text, speaker)}
            if number == 0:  # codes may be in files
                np.save(folder / "dialogue0.npy", np.array(audio["codes"], np.int16))
                audio["codes"] = "dialogue0.npy"
            message: dict[str, Any] = {"role": str(speaker), "content": [{"type": "text", "text": text}, audio]}
            if turn == 0 and number % 6 == 2:
                message["loss"] = False
            messages.append(message)
        rows.append({"messages": messages})
    return rows


def main(folder: Path) -> None:
    audio_files = sorted(path.name for path in folder.glob("audio*.flac"))
    rows = dialogues(audio_files, random.Random(0), 96, folder)
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    (folder / "dialogues.jsonl").write_text("\n".join(lines) + "\n")
    write_tokenizer(folder / "dialogues", list(LINES), SPECIAL, CHAT_TEMPLATE)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "dialogues")
    tokenizer.bos_token, tokenizer.eos_token = SPECIAL[1:3]
    tokenizer.save_pretrained(folder / "dialogues")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
