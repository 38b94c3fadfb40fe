"""Makes what the digits demo learns from: rows of five tasks, a tokenizer of 38 tokens, a codebook of patches.

    python examples/digits/make_rows.py runs/digits_data

Handwriting is the UCI set inside scikit-learn (1,797 pictures of 8 x 8, 297 of them held out), speech is speech.parquet
(its held-out voices are not heard in training). Takes seconds, and gives the same files every time.
"""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import soundfile
from PIL import Image
from scipy.ndimage import affine_transform
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omnizoo import fit_patch_codebook, save_patch_codebook

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
NUMBERS += ["ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"]
WORDS = ["user", "assistant", "Read", "Listen", "Draw", "Add", "plus", "makes", *NUMBERS]
MARKS = [f"<|{name}_{mark}|>" for name in ("image", "audio") for mark in ("begin", "pad", "end")]
CHAT_TEMPLATE = (  # the tags spare the renderer from finding out what of it the model writes
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPEECH = Path(__file__).parent / "speech.parquet"
HELD_OUT_PICTURES = 297
VARIATIONS = {"image": 3, "audio": 5}  # of every picture and clip that is trained on, besides itself
PAIRS = {"train": 6000, "held_out": 300}  # of a picture and a clip, to be added
PATCH, CODES = 2, 64

Array = npt.NDArray[Any]
Part = dict[str, Any]
Row = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Items:
    """Encoded pictures or clips, and the digit of each."""

    kind: str
    data: list[bytes]
    digits: Array

    def part(self, index: int) -> Part:
        return {"type": self.kind, self.kind: {"bytes": self.data[index]}}


def png(picture: Array) -> bytes:
    """`picture [8, 8]` with values 0..16."""
    file = io.BytesIO()
    Image.fromarray(np.rint(picture * (255 / 16)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def flac(wave: Array, rate: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="FLAC", subtype="PCM_S8")
    return file.getvalue()


def tilted(picture: Array, rng: np.random.Generator) -> Array:
    """Turned, slanted, scaled and moved by a little."""
    angle, slant, scale = rng.uniform(-0.17, 0.17), rng.uniform(-0.15, 0.15), rng.uniform(0.9, 1.1)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn @ np.array([[1, 0], [slant, 1]]) / scale
    center = np.full(2, 3.5)
    moved: Array = affine_transform(picture, matrix, center - matrix @ center + rng.uniform(-0.4, 0.4, 2), order=1)
    return moved


def revoiced(wave: Array, rng: np.random.Generator) -> Array:
    """Faster and higher or slower and lower, quieter, with some noise: as if another voice had spoken."""
    length = int(len(wave) * rng.uniform(0.88, 1.12))
    played = np.interp(np.linspace(0, len(wave) - 1, length), np.arange(len(wave)), wave)
    noisy: Array = played * rng.uniform(0.5, 0.9) + rng.normal(size=length) * 10 ** rng.uniform(-4, -2)
    return noisy.clip(-1, 1)


def varied(kind: str, raw: list[Array], digits: Array, vary: Callable[[Array], Array], encode: Any) -> Items:
    copies = [*raw, *(vary(item) for _ in range(VARIATIONS[kind]) for item in raw)]
    return Items(kind, [encode(item) for item in copies], np.tile(digits, 1 + VARIATIONS[kind]))


def read_pictures(rng: np.random.Generator) -> tuple[Items, Items, list[Array]]:
    """To train on, held out, and the former as they are (0..16)."""
    pictures, digits = load_digits(return_X_y=True)
    pictures = pictures.reshape(-1, 8, 8)
    train, held_out = train_test_split(
        np.arange(len(digits)), test_size=HELD_OUT_PICTURES, stratify=digits, random_state=0
    )
    plain = list(pictures[train])
    trained = varied("image", plain, digits[train], lambda picture: tilted(picture, rng), png)
    return trained, Items("image", [png(picture) for picture in pictures[held_out]], digits[held_out]), plain


def read_clips(rng: np.random.Generator) -> tuple[Items, Items]:
    table = pyarrow.parquet.read_table(SPEECH)
    split, digits = (table[name].to_numpy() for name in ("split", "digit"))
    train, held_out = (
        [table["audio"][int(i)].as_py() for i in np.flatnonzero(split == s)] for s in ("train", "held_out")
    )
    waves, rates = zip(*(soundfile.read(io.BytesIO(clip)) for clip in train), strict=True)
    trained = varied(
        "audio", list(waves), digits[split == "train"], lambda w: revoiced(w, rng), lambda w: flac(w, rates[0])
    )
    return trained, Items("audio", held_out, digits[split == "held_out"])


def row(question: list[str | Part], answer: list[str | Part]) -> Row:
    def turn(role: str, parts: list[str | Part]) -> dict[str, Any]:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        return {"role": role, "content": content}

    return {"messages": [turn("user", question), turn("assistant", answer)]}


def rows_of_tasks(
    pictures: Items, clips: Items, drawings: Items, pairs: int, rng: np.random.Generator
) -> dict[str, list[Row]]:
    """`drawings` are what the model shall draw. It always says which digit before it draws or adds it."""
    read = [row(["Read", pictures.part(i)], [NUMBERS[d]]) for i, d in enumerate(pictures.digits)]
    listen = [row(["Listen", clips.part(i)], [NUMBERS[d]]) for i, d in enumerate(clips.digits)]
    draw = [row([f"Draw {NUMBERS[d]}"], [NUMBERS[d], drawings.part(i)]) for i, d in enumerate(drawings.digits)]
    drawn = [np.flatnonzero(drawings.digits == digit) for digit in range(10)]
    draw_spoken = [
        row(["Draw", clips.part(i)], [NUMBERS[d], drawings.part(rng.choice(drawn[d]))])
        for i, d in enumerate(clips.digits)
    ]
    add = []
    for i, j in zip(
        rng.integers(len(pictures.data), size=pairs), rng.integers(len(clips.data), size=pairs), strict=True
    ):
        a, b = pictures.digits[i], clips.digits[j]
        answer = f"{NUMBERS[a]} plus {NUMBERS[b]} makes {NUMBERS[a + b]}"
        add.append(row(["Add", pictures.part(i), clips.part(j)], [answer]))
    return {"read": read, "listen": listen, "draw": draw, "draw_spoken": draw_spoken, "add": add}


def write_tokenizer(folder: Path) -> None:
    special = ["<|pad|>", "<|endoftext|>", "<|unknown|>", "<|im_start|>", "<|im_end|>", *MARKS]
    words = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|unknown|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    pictures, held_out_pictures, plain = read_pictures(rng)
    clips, held_out_clips = read_clips(rng)
    drawings = Items("image", pictures.data[: len(plain)], pictures.digits[: len(plain)])  # real ones only
    splits = {
        "train": (pictures, clips, drawings),
        "held_out": (held_out_pictures, held_out_clips, held_out_pictures),
    }
    for split, items in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for task, rows in rows_of_tasks(*items, PAIRS[split], rng).items():
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / split / f"{task}.parquet")
            print(f"{split}/{task}.parquet: {len(rows):,} rows")
    write_tokenizer(folder / "tokenizer")
    gray = [np.rint(picture * (255 / 16)).astype(np.uint8) for picture in plain]
    save_patch_codebook(folder / "codebook", fit_patch_codebook(gray, PATCH, CODES, seed=0), PATCH, size=8)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
