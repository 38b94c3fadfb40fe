"""Write rows with a voice that the model of the digits demo does not understand, and evaluate the trained adapter.

    python examples/digits/new_voice.py rows runs/new_voice_data
    python examples/digits/new_voice.py examine runs/new_voice_adapter

The new voice is the clips of speech.parquet at 1.6 times the speed and pitch. The demo itself changes the speed of
voices by at most 12 %. The held-out voices of the demo are also held out here.
"""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import soundfile
import torch
from make_rows import NUMBERS, SPEECH, Array, Items, augment_speech, flac, row
from peft import PeftModel
from rich.console import Console
from rich.table import Table

from omnizoo import ChatModel, Sampling, load_chat_model

BASE_MODEL = "runs/digits/model"
OLD_VOICES = "runs/digits_data/held_out/listen.parquet"
NEW_VOICE = "runs/new_voice_data/held_out.parquet"
SPEED = 1.6
VARIATIONS = 3  # augmented copies of each training clip
GOAL = 0.9  # accuracy on the new voice


def speed_up(wave: Array) -> Array:
    """Return the waveform at `SPEED` times its speed and pitch."""
    positions = np.linspace(0, len(wave) - 1, int(len(wave) / SPEED))
    resampled: Array = np.interp(positions, np.arange(len(wave)), wave)
    return resampled


def make_rows(folder: Path) -> None:
    """Write the training and held-out rows of the new voice."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    clips = pyarrow.parquet.read_table(SPEECH).to_pylist()
    for split in ("train", "held_out"):
        num_variations = VARIATIONS if split == "train" else 0
        data = []
        digits = []
        for clip in clips:
            if clip["split"] == split:
                wave, rate = soundfile.read(io.BytesIO(clip["audio"]))
                faster = speed_up(wave)
                waves = [faster, *(augment_speech(faster, rng) for _ in range(num_variations))]
                data += [flac(wave, rate) for wave in waves]
                digits += [clip["digit"]] * len(waves)
        items = Items("audio", data, np.array(digits))
        rows = [row(["Listen", items.part(i)], [NUMBERS[digit]]) for i, digit in enumerate(digits)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
        print(f"{folder}/{split}.parquet: {len(rows):,} rows")


def accuracy(chat_model: ChatModel, file: str) -> float:
    """Return the fraction of the clips in `file` whose digit the model names correctly."""
    are_correct = []
    for held_out_row in pyarrow.parquet.read_table(file).to_pylist():
        *prompt, response = held_out_row["messages"]
        pieces = chat_model.write(prompt, Sampling(0.0), max_tokens=12)
        words = [chat_model.tokenizer.decode(piece.ids) for piece in pieces if piece.modality == "text"]
        are_correct.append(" ".join(words).strip() == response["content"][0]["text"])
    return sum(are_correct) / len(are_correct)


def examine(adapter: Path) -> int:
    """Compare the accuracy before and after training; return 1 if the goal is missed."""
    torch.set_num_threads(1)  # operations this small are slower on two threads
    chat_model = load_chat_model(BASE_MODEL)
    files = {"the new voice": NEW_VOICE, "the voices of the demo": OLD_VOICES}
    before = {name: accuracy(chat_model, file) for name, file in files.items()}
    weights = sum(parameter.numel() for parameter in chat_model.model.parameters())
    adapted = PeftModel.from_pretrained(chat_model.model, adapter)  # inserts its layers into `chat_model.model`
    after = {name: accuracy(chat_model, file) for name, file in files.items()}
    trained = sum(parameter.numel() for name, parameter in adapted.named_parameters() if ".lora_" in name)
    table = Table(title=f"Spoken digits of held-out speakers, {trained / weights:.1%} of the weights trained")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    for name in files:
        table.add_row(name, f"{before[name]:.1%}", f"{after[name]:.1%}")
    Console().print(table)
    figures = {"weights": trained / weights, "before": before, "after": after}
    (adapter / "examination.json").write_text(json.dumps(figures, indent=2) + "\n")
    return int(after["the new voice"] < GOAL)


if __name__ == "__main__":
    command = sys.argv[1]
    folder = Path(sys.argv[2])
    sys.exit(make_rows(folder) if command == "rows" else examine(folder))
