"""Write the data of the digits demo: rows of five tasks, a tokenizer of 38 tokens, a codebook of patches.

    python examples/digits/make_rows.py runs/digits_data

Handwriting is the UCI dataset in scikit-learn (1,797 images of 8 x 8 pixels, 297 of them held out). Speech is
speech.parquet, whose held-out voices are not in the training rows. The script takes seconds and is deterministic.
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
CHAT_TEMPLATE = (  # {% generation %} marks the targets
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPEECH = Path(__file__).parent / "speech.parquet"
HELD_OUT_IMAGES = 297
VARIATIONS = {"image": 3, "audio": 5}  # augmented copies of each training item, in addition to the original
PAIRS = {"train": 6000, "held_out": 300}  # pairs of an image and an audio clip whose digits are added
PATCH = 2  # pixels
CODES = 64

Array = npt.NDArray[Any]
Part = dict[str, Any]
Row = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Items:
    """Encoded images or audio clips, and the digit of each."""

    kind: str
    data: list[bytes]
    digits: Array

    def part(self, index: int) -> Part:
        """Return an item as a content part of a message."""
        return {"type": self.kind, self.kind: {"bytes": self.data[index]}}


def png(image: Array) -> bytes:
    """Encode an image, [8, 8] with values 0 to 16, as PNG."""
    file = io.BytesIO()
    Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def flac(wave: Array, rate: int) -> bytes:
    """Encode a waveform as FLAC with 8 bits per sample."""
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format="FLAC", subtype="PCM_S8")
    return file.getvalue()


def augment_image(image: Array, rng: np.random.Generator) -> Array:
    """Return the image with a small random rotation, slant, scale and shift."""
    angle = rng.uniform(-0.17, 0.17)
    slant = rng.uniform(-0.15, 0.15)
    scale = rng.uniform(0.9, 1.1)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = rotation @ np.array([[1, 0], [slant, 1]]) / scale
    center = np.full(2, 3.5)
    offset = center - matrix @ center + rng.uniform(-0.4, 0.4, 2)
    augmented: Array = affine_transform(image, matrix, offset, order=1)
    return augmented


def augment_speech(wave: Array, rng: np.random.Generator) -> Array:
    """Return the speech with random speed, pitch, volume and noise, so it resembles another voice."""
    length = int(len(wave) * rng.uniform(0.88, 1.12))
    resampled = np.interp(np.linspace(0, len(wave) - 1, length), np.arange(len(wave)), wave)
    noisy: Array = resampled * rng.uniform(0.5, 0.9) + rng.normal(size=length) * 10 ** rng.uniform(-4, -2)
    return noisy.clip(-1, 1)


def augmented_items(
    kind: str, originals: list[Array], digits: Array, augment: Callable[[Array], Array], encode: Any
) -> Items:
    """Return the encoded originals, followed by their augmented copies."""
    copies = [augment(item) for _ in range(VARIATIONS[kind]) for item in originals]
    data = [encode(item) for item in [*originals, *copies]]
    return Items(kind, data, np.tile(digits, 1 + VARIATIONS[kind]))


def read_images(rng: np.random.Generator) -> tuple[Items, Items, list[Array]]:
    """Return training images, held-out images, and the unencoded training originals with values 0 to 16."""
    images, digits = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8)
    train, held_out = train_test_split(
        np.arange(len(digits)), test_size=HELD_OUT_IMAGES, stratify=digits, random_state=0
    )
    originals = list(images[train])
    training_items = augmented_items("image", originals, digits[train], lambda image: augment_image(image, rng), png)
    held_out_items = Items("image", [png(image) for image in images[held_out]], digits[held_out])
    return training_items, held_out_items, originals


def read_clips(rng: np.random.Generator) -> tuple[Items, Items]:
    """Return training and held-out audio clips."""
    table = pyarrow.parquet.read_table(SPEECH)
    digits = table["digit"].to_numpy()
    is_train = table["split"].to_numpy() == "train"
    train = [table["audio"][int(i)].as_py() for i in np.flatnonzero(is_train)]
    held_out = [table["audio"][int(i)].as_py() for i in np.flatnonzero(~is_train)]

    waves, rates = zip(*(soundfile.read(io.BytesIO(clip)) for clip in train), strict=True)
    training_items = augmented_items(
        "audio",
        list(waves),
        digits[is_train],
        augment=lambda wave: augment_speech(wave, rng),
        encode=lambda wave: flac(wave, rates[0]),
    )
    return training_items, Items("audio", held_out, digits[~is_train])


def row(prompt: list[str | Part], response: list[str | Part]) -> Row:
    """Return a row with one user turn and one assistant turn."""

    def turn(role: str, parts: list[str | Part]) -> dict[str, Any]:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        return {"role": role, "content": content}

    return {"messages": [turn("user", prompt), turn("assistant", response)]}


def rows_of_tasks(
    images: Items, clips: Items, drawings: Items, pairs: int, rng: np.random.Generator
) -> dict[str, list[Row]]:
    """Return the rows of each task.

    `drawings` are the images that the model generates. Each response names the digit before it draws or adds it.
    """
    read = [row(["Read", images.part(i)], [NUMBERS[digit]]) for i, digit in enumerate(images.digits)]
    listen = [row(["Listen", clips.part(i)], [NUMBERS[digit]]) for i, digit in enumerate(clips.digits)]

    draw = []
    for i, digit in enumerate(drawings.digits):
        word = NUMBERS[digit]
        draw.append(row([f"Draw {word}"], [word, drawings.part(i)]))

    drawings_of_digit = [np.flatnonzero(drawings.digits == digit) for digit in range(10)]
    draw_spoken = []
    for i, digit in enumerate(clips.digits):
        drawing = drawings.part(rng.choice(drawings_of_digit[digit]))
        draw_spoken.append(row(["Draw", clips.part(i)], [NUMBERS[digit], drawing]))

    add = []
    image_indices = rng.integers(len(images.data), size=pairs)
    clip_indices = rng.integers(len(clips.data), size=pairs)
    for i, j in zip(image_indices, clip_indices, strict=True):
        a = images.digits[i]
        b = clips.digits[j]
        response = f"{NUMBERS[a]} plus {NUMBERS[b]} makes {NUMBERS[a + b]}"
        add.append(row(["Add", images.part(i), clips.part(j)], [response]))

    return {"read": read, "listen": listen, "draw": draw, "draw_spoken": draw_spoken, "add": add}


def write_tokenizer(folder: Path) -> None:
    """Save a tokenizer of whole words with a chat template."""
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
    images, held_out_images, originals = read_images(rng)
    clips, held_out_clips = read_clips(rng)
    # The model learns to draw real handwriting, not its augmented copies.
    drawings = Items("image", images.data[: len(originals)], images.digits[: len(originals)])

    splits = {
        "train": (images, clips, drawings),
        "held_out": (held_out_images, held_out_clips, held_out_images),
    }
    for split, (split_images, split_clips, split_drawings) in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        tasks = rows_of_tasks(split_images, split_clips, split_drawings, PAIRS[split], rng)
        for task, rows in tasks.items():
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / split / f"{task}.parquet")
            print(f"{split}/{task}.parquet: {len(rows):,} rows")

    write_tokenizer(folder / "tokenizer")
    gray = [np.rint(image * (255 / 16)).astype(np.uint8) for image in originals]
    save_patch_codebook(folder / "codebook", fit_patch_codebook(gray, PATCH, CODES, seed=0), PATCH, size=8)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
