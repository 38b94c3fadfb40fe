"""Makes answers that are said aloud, as codes of a codec: `said_aloud.jsonl` of `rows.jsonl`, for Qwen3-Omni;
`one_codebook.jsonl` of `scenes.jsonl`, and the voices of a tiny Qwen2.5-Omni, `spk_dict.safetensors`.

    python examples/published/make_speech.py examples/published/data

The codes follow from the letters of the answer, so that there is something to learn. Some rows are not spoken.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CODES, BOOKS, SPEAKERS = 64, 4, ("ada", "ben")
# Of the tiny model: the token before what each speaker says, and the sizes of what its codec goes by.
FIRST_TOKEN, CONDITION, FRAMES, MELS = 387, 8, 12, 8


def say(text: str, speaker: int) -> list[list[int]]:
    """A frame for every two letters; later codebooks refine the first."""
    first = [(ord(letter) + 7 * speaker) % CODES for letter in text[::2]]
    return [[(code * (book + 1) + book) % CODES for book in range(BOOKS)] for code in first]


def main(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    spoken = folder / "codes0.npy"
    written = []
    for number, row in enumerate(rows):
        text, speaker = row["messages"][-1]["content"], number % 2
        if number % 3 == 2:
            written.append(row)
            continue
        codes = say(text, speaker)
        if number == 0:  # codes may be in files
            np.save(spoken, np.array(codes, np.int16))
        part = {"type": "speech", "codes": codes if number else spoken.name, "speaker": SPEAKERS[speaker]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": text}, part]}
        written.append(row | {"messages": [*row["messages"][:-1], answer]})
    lines = [json.dumps(row, separators=(",", ":")) for row in written]
    (folder / "said_aloud.jsonl").write_text("\n".join(lines) + "\n")
    one_codebook(folder)


def one_codebook(folder: Path) -> None:
    """Codes as a list, or as frames x 1."""
    written = []
    for number, line in enumerate((folder / "scenes.jsonl").read_text().splitlines()):
        row, speaker = json.loads(line), number % 2
        text = row["messages"][-1]["content"]
        if number % 3 != 2:
            codes = [frame[:1] if number % 2 else frame[0] for frame in say(text, speaker)]
            part = {"type": "speech", "codes": codes, "speaker": SPEAKERS[speaker]}
            row["messages"][-1]["content"] = [{"type": "text", "text": text}, part]
        written.append(json.dumps(row, separators=(",", ":")))
    (folder / "one_codebook.jsonl").write_text("\n".join(written) + "\n")
    dice, voices = np.random.default_rng(0), {}
    for number, name in enumerate(SPEAKERS):
        voices[f"{name}.bos_token"] = np.array([FIRST_TOKEN + number])
        voices[f"{name}.cond"] = dice.normal(size=(1, CONDITION)).astype(np.float32)
        voices[f"{name}.ref_mel"] = dice.normal(size=(1, FRAMES, MELS)).astype(np.float32)
    save_file(voices, folder / "spk_dict.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
