"""Write rows with spoken responses as codec codes.

`said_aloud.jsonl` is `rows.jsonl` with speech for Qwen3-Omni. `one_codebook.jsonl` is `scenes.jsonl` with speech for
Qwen2.5-Omni, and `spk_dict.safetensors` has the speakers of a tiny Qwen2.5-Omni.

    python examples/published/make_speech.py examples/published/data

Codes are a function of the letters of the response, so a model can learn them. Some rows have no speech.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CODES = 64
CODEBOOKS = 4
SPEAKERS = ("ada", "ben")
# Sizes of the tiny model: the first token of the first speaker, and the inputs of its codec per speaker.
FIRST_TOKEN = 387
CONDITION_WIDTH = 8
MEL_FRAMES = 12
MEL_BINS = 8


def encode_speech(text: str, speaker: int) -> list[list[int]]:
    """Return codes, [frames, codebooks], with one frame per two letters."""
    first_codes = [(ord(letter) + 7 * speaker) % CODES for letter in text[::2]]
    return [[(code * (book + 1) + book) % CODES for book in range(CODEBOOKS)] for code in first_codes]


def main(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    codes_file = folder / "codes0.npy"
    spoken_rows = []
    for number, row in enumerate(rows):
        text = row["messages"][-1]["content"]
        speaker = number % 2
        if number % 3 == 2:
            spoken_rows.append(row)
            continue
        codes = encode_speech(text, speaker)
        if number == 0:  # codes may be in files
            np.save(codes_file, np.array(codes, np.int16))
        part = {"type": "speech", "codes": codes if number else codes_file.name, "speaker": SPEAKERS[speaker]}
        response = {"role": "assistant", "content": [{"type": "text", "text": text}, part]}
        spoken_rows.append(row | {"messages": [*row["messages"][:-1], response]})
    lines = [json.dumps(row, separators=(",", ":")) for row in spoken_rows]
    (folder / "said_aloud.jsonl").write_text("\n".join(lines) + "\n")
    write_one_codebook_rows(folder)
    write_speakers(folder)


def write_one_codebook_rows(folder: Path) -> None:
    """Write rows whose codes have one codebook, as [frames] or [frames, 1]."""
    lines = []
    for number, line in enumerate((folder / "scenes.jsonl").read_text().splitlines()):
        row = json.loads(line)
        speaker = number % 2
        text = row["messages"][-1]["content"]
        if number % 3 != 2:
            codes = [frame[:1] if number % 2 else frame[0] for frame in encode_speech(text, speaker)]
            part = {"type": "speech", "codes": codes, "speaker": SPEAKERS[speaker]}
            row["messages"][-1]["content"] = [{"type": "text", "text": text}, part]
        lines.append(json.dumps(row, separators=(",", ":")))
    (folder / "one_codebook.jsonl").write_text("\n".join(lines) + "\n")


def write_speakers(folder: Path) -> None:
    """Write random codec inputs for each speaker."""
    rng = np.random.default_rng(0)
    tensors = {}
    for number, name in enumerate(SPEAKERS):
        tensors[f"{name}.bos_token"] = np.array([FIRST_TOKEN + number])
        tensors[f"{name}.cond"] = rng.normal(size=(1, CONDITION_WIDTH)).astype(np.float32)
        tensors[f"{name}.ref_mel"] = rng.normal(size=(1, MEL_FRAMES, MEL_BINS)).astype(np.float32)
    save_file(tensors, folder / "spk_dict.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
