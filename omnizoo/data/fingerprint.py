"""What the data of a run is, in a few hashes: the same wherever it lies, another if rows or their reading change.

Up to `WHOLE` bytes of a source are hashed, beyond that blocks spread evenly over it. The length of every row (JSONL),
the table of contents (tar) and the footers (Parquet) are hashed in full: an edit outside of the blocks is found if it
changes any length.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import PreTrainedTokenizerBase

from omnizoo.data.columns import RenamedRows
from omnizoo.data.csv_rows import CsvRows
from omnizoo.data.dataset_rows import DatasetRows
from omnizoo.data.given_rows import GivenRows
from omnizoo.data.json_lines import JsonLines
from omnizoo.data.parquet_rows import ParquetRows
from omnizoo.data.rows import BadRow, RowSource
from omnizoo.data.sources import Concatenation
from omnizoo.data.taken_rows import TakenRows
from omnizoo.data.tar_samples import TarSamples
from omnizoo.modalities.base import Item
from omnizoo.modalities.processor_files import processor_files

WHOLE = 256 << 20  # bytes
BLOCK = 256 << 10
BLOCKS = 256  # of a source that is larger
DATASET_ROWS = 512  # of what `datasets` has opened, or code of the user's reads
GIVEN_ROWS = 100_000  # of what is in memory


def content_of_item(item: Item) -> str:
    """A hash of a prepared item: of what its encoder is given."""
    assert item.inputs is not None
    digest = xxhash.xxh3_128(str(item.port).encode())
    for name, tensor in sorted(item.inputs.items()):
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def content_of(source: RowSource) -> dict[str, Any]:
    """Size and hashes of a source; nothing in it depends on where the files are."""
    while isinstance(source, RenamedRows | TakenRows):  # as it is stored; the rest is another part of the fingerprint
        source = source.source
    parts = source.parts if isinstance(source, Concatenation) else [source]
    shape, digest = xxhash.xxh3_128(), xxhash.xxh3_128()
    files: list[Path] = []
    for part in parts:
        shape.update(f"{type(part).__name__}/{len(part)};".encode())
        if isinstance(part, JsonLines | CsvRows):
            shape.update(np.ascontiguousarray(part.stops - part.starts).data)
        elif isinstance(part, TarSamples):
            shape.update("\0".join(map(repr, zip(part.keys, part.kinds, strict=True))).encode("utf-8", "replace"))
            shape.update(np.ascontiguousarray(part.spans).data)
        elif isinstance(part, ParquetRows):
            shape.update(_footer(part.path))
        elif isinstance(part, DatasetRows):
            for row in _spread(len(part), DATASET_ROWS):
                digest.update(repr(part.dataset[row].to_pylist()).encode("utf-8", "replace"))
        else:
            most = GIVEN_ROWS if isinstance(part, GivenRows) and part.is_in_memory else DATASET_ROWS
            for row in _spread(len(part), most):
                _add_row(digest, part, row)
        if isinstance(part, JsonLines | CsvRows | TarSamples | ParquetRows):
            files.append(part.path)
    sizes = [file.stat().st_size for file in files]
    for file, start, count in _blocks(files, sizes):
        digest.update(_read(file, start, count))
    return {"bytes": sum(sizes), "shape": shape.hexdigest(), "content": digest.hexdigest()}


def _add_row(digest: xxhash.xxh3_128, source: RowSource, row: int) -> None:
    try:
        _add(digest, source.read(row))
    except BadRow as bad:
        digest.update(f"bad: {bad}".encode("utf-8", "replace"))


def _add(digest: xxhash.xxh3_128, value: Any) -> None:
    """Hash a value of a row by what is in it, the same in every process: `repr` has addresses of objects, and leaves
    out the middle of arrays."""
    digest.update(f"{type(value).__name__}(".encode())
    if isinstance(value, Mapping):
        for key, part in value.items():
            _add(digest, key)
            _add(digest, part)
    elif isinstance(value, list | tuple):
        for part in value:
            _add(digest, part)
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, str | int | float | PurePath | None):
        digest.update(str(value).encode("utf-8", "replace"))
    elif isinstance(value, torch.Tensor):
        _add(digest, value.detach().cpu().double().numpy())
    elif callable(getattr(value, "tobytes", None)):  # arrays, and pictures of PIL
        digest.update(f"{getattr(value, 'shape', None) or getattr(value, 'size', None)}".encode() + value.tobytes())
    digest.update(b")")


def _blocks(files: Sequence[Path], sizes: Sequence[int]) -> Iterator[tuple[Path, int, int]]:
    """(file, first byte, bytes) of what is hashed: all of it, or evenly spaced blocks, each inside one file."""
    total = sum(sizes)
    if total <= WHOLE:
        for file, size in zip(files, sizes, strict=True):
            for start in range(0, size, 1 << 24):
                yield file, start, 1 << 24
        return
    firsts = list(accumulate(sizes, initial=0))
    for place in _spread(total - BLOCK + 1, BLOCKS):
        number = int(np.searchsorted(firsts, place, side="right")) - 1
        yield files[number], place - firsts[number], BLOCK


def _spread(count: int, most: int) -> list[int]:
    """At most `most` numbers below `count`, evenly spaced, the first and the last among them."""
    return sorted({int(place) for place in np.linspace(0, max(0, count - 1), min(count, most))})


def _footer(path: Path) -> bytes:
    """Where each column of each row group of a Parquet file is, how large, and often its extremes."""
    size = path.stat().st_size
    length = int.from_bytes(_read(path, size - 8, 4), "little")  # then four letters end the file
    return _read(path, max(0, size - 8 - length), length)


def _read(path: Path, start: int, count: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(count)


def reading_of(tokenizer: PreTrainedTokenizerBase, folder: str | None) -> dict[str, Any]:
    """What turns rows into tokens and items: the tokenizer, its chat template, and how media are preprocessed."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    return {
        "its vocabulary": _hash(repr(vocabulary)),
        "its special tokens": _hash(repr(special)),
        "its chat template": _hash(repr(tokenizer.chat_template)),
        "its definition": _hash(tokenizer.backend_tokenizer.to_str()),
        "library": version("tokenizers"),  # which may write the same definition in another way
        "its preprocessing of media": _hash("".join(path.name + path.read_text() for path in processor_files(folder))),
    }


def _hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))
