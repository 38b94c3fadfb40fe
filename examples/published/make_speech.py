"""Makes `examples/published/data/said_aloud.jsonl` of `rows.jsonl`: answers that are said aloud, as codes of a codec.

    python examples/published/make_speech.py examples/published/data

The codes follow from the letters of the answer, so that there is something to learn. Some rows are not spoken.
"""

import json
import sys
from pathlib import Path

import numpy as np

CODES, BOOKS, SPEAKERS = 64, 4, ("ada", "ben")


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
