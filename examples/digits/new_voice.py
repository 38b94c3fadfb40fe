"""A voice that the model of the digits demo does not understand: rows to learn it from, and how well it is learnt.

    python examples/digits/new_voice.py rows runs/new_voice_data
    python examples/digits/new_voice.py examine runs/new_voice_adapter

The voice is a very small one: clips of speech.parquet, played 1.6 times as fast and so as high. The demo itself only
hears voices changed by 12 %. Voices that are held out there are held out here.
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
from make_rows import NUMBERS, SPEECH, Array, Items, flac, revoiced, row
from peft import PeftModel
from rich.console import Console
from rich.table import Table

from omnizoo import ChatModel, Sampling, load_chat_model

BASE, OLD, NEW = "runs/digits/model", "runs/digits_data/held_out/listen.parquet", "runs/new_voice_data/held_out.parquet"
FASTER = 1.6
VARIATIONS = 3  # of every clip that is trained on
GOAL = 0.9  # of the new voice


def small(wave: Array) -> Array:
    places = np.linspace(0, len(wave) - 1, int(len(wave) / FASTER))
    played: Array = np.interp(places, np.arange(len(wave)), wave)
    return played


def make_rows(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    clips = pyarrow.parquet.read_table(SPEECH).to_pylist()
    for split in ("train", "held_out"):
        data, digits = [], []
        for clip in clips:
            if clip["split"] == split:
                wave, rate = soundfile.read(io.BytesIO(clip["audio"]))
                voices = [small(wave)]
                voices += [revoiced(voices[0], rng) for _ in range(VARIATIONS if split == "train" else 0)]
                data += [flac(voice, rate) for voice in voices]
                digits += [clip["digit"]] * len(voices)
        items = Items("audio", data, np.array(digits))
        rows = [row(["Listen", items.part(i)], [NUMBERS[digit]]) for i, digit in enumerate(digits)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
        print(f"{folder}/{split}.parquet: {len(rows):,} rows")


def understood(writer: ChatModel, file: str) -> float:
    """How many of the clips in `file` the model names."""
    right = []
    for each in pyarrow.parquet.read_table(file).to_pylist():
        *question, answer = each["messages"]
        pieces = writer.write(question, Sampling(0.0), max_tokens=12)
        said = " ".join(writer.tokenizer.decode(piece.ids) for piece in pieces if piece.modality == "text").strip()
        right.append(said == answer["content"][0]["text"])
    return sum(right) / len(right)


def examine(adapter: Path) -> int:
    torch.set_num_threads(1)  # ops this small are slower on two
    writer, files = load_chat_model(BASE), {"the new voice": NEW, "the voices of the demo": OLD}
    before = {name: understood(writer, file) for name, file in files.items()}
    weights = sum(parameter.numel() for parameter in writer.model.parameters())
    adapted = PeftModel.from_pretrained(writer.model, adapter)  # puts its layers into the model that it is given
    after = {name: understood(writer, file) for name, file in files.items()}
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
    task, place = sys.argv[1], Path(sys.argv[2])
    sys.exit(make_rows(place) if task == "rows" else examine(place))
