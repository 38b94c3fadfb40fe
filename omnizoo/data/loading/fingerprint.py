"""Hashes that identify the data of a run. They do not depend on where the files are stored.

A source of at most `WHOLE` bytes is hashed completely. In a larger source, only evenly spaced blocks are hashed.
The lengths of all rows (JSONL, CSV), the table of contents (tar) or the footers (Parquet) are always hashed. An edit
outside the blocks is therefore detected if it changes the length of a row.
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

from omnizoo.data.row import BadRow
from omnizoo.data.sources.base import RowSource
from omnizoo.data.sources.hf_datasets import HFDataset
from omnizoo.data.sources.jsonl import IndexedFile
from omnizoo.data.sources.open import Concatenation
from omnizoo.data.sources.parquet import ParquetFile
from omnizoo.data.sources.precomputed import PrecomputedRows
from omnizoo.data.sources.python_rows import PythonRows
from omnizoo.data.sources.renamed_columns import RenamedRows
from omnizoo.data.sources.subset import RowSubset
from omnizoo.data.sources.webdataset import WebDatasetFile
from omnizoo.modalities.processor_files import processor_files

WHOLE = 256 << 20  # bytes; larger sources are hashed in blocks
BLOCK = 256 << 10  # number of bytes in a block
BLOCKS = 256  # number of blocks that are hashed in a larger source
DATASET_ROWS = 512  # number of rows that are hashed in a `datasets` dataset or a row source plugin
ROWS_IN_MEMORY = 100_000  # number of rows that are hashed if the rows are a Python list


def content_of(source: RowSource) -> dict[str, Any]:
    """Return the size of a source in bytes, a hash of its row lengths and a hash of its content."""
    # Hash the rows as they are stored. Checkpoints store the keys `columns` and `take` separately.
    while isinstance(source, RenamedRows | RowSubset):
        source = source.source
    parts = source.parts if isinstance(source, Concatenation) else [source]
    layout = xxhash.xxh3_128()
    content = xxhash.xxh3_128()
    files: list[Path] = []
    for part in parts:
        layout.update(f"{part.stored_kind}/{len(part)};".encode())
        if isinstance(part, IndexedFile | WebDatasetFile | ParquetFile):
            _add_layout(layout, part)
            files.append(part.path)
            if isinstance(part, PrecomputedRows):  # it has the hashes of the shards
                files.append(part.content.file)
        elif isinstance(part, HFDataset):
            for row in _evenly_spaced(len(part), DATASET_ROWS):
                content.update(repr(part.dataset[row].to_pylist()).encode("utf-8", "replace"))
        else:
            is_in_memory = isinstance(part, PythonRows) and part.is_in_memory
            num_rows = ROWS_IN_MEMORY if is_in_memory else DATASET_ROWS
            for row in _evenly_spaced(len(part), num_rows):
                _add_row(content, part, row)

    sizes = [file.stat().st_size for file in files]
    for file, start, count in _blocks(files, sizes):
        content.update(_read(file, start, count))
    return {"bytes": sum(sizes), "shape": layout.hexdigest(), "content": content.hexdigest()}


def _add_layout(digest: xxhash.xxh3_128, source: IndexedFile | WebDatasetFile | ParquetFile) -> None:
    """Add the row lengths (JSONL, CSV), the table of contents (tar) or the footer (Parquet) of a file to the hash."""
    if isinstance(source, IndexedFile):
        digest.update(np.ascontiguousarray(source.stops - source.starts).data)
    elif isinstance(source, ParquetFile):
        digest.update(_footer(source.path))
    else:
        members = "\0".join(map(repr, zip(source.keys, source.kinds, strict=True)))
        digest.update(members.encode("utf-8", "replace"))
        digest.update(np.ascontiguousarray(source.spans).data)


def _add_row(digest: xxhash.xxh3_128, source: RowSource, row: int) -> None:
    """Add a row of a Python source to the hash.

    A bad row is represented by a fixed text and not by its error message, because messages may change.
    """
    try:
        _add(digest, source.read(row))
    except BadRow:
        digest.update(b"bad row")


def _add(digest: xxhash.xxh3_128, value: Any) -> None:
    """Add a value of a row to the hash. The result is the same in every process.

    `repr` would not be suitable, because it contains the addresses of objects and omits the middle of arrays.
    """
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
    elif callable(getattr(value, "tobytes", None)):  # arrays and PIL images
        shape = getattr(value, "shape", None) or getattr(value, "size", None)
        digest.update(str(shape).encode() + value.tobytes())
    digest.update(b")")


def _blocks(files: Sequence[Path], sizes: Sequence[int]) -> Iterator[tuple[Path, int, int]]:
    """Yield the parts of files to hash, as (file, first byte, number of bytes).

    The parts cover small sources completely. In large sources, they are evenly spaced blocks. A block may extend beyond
    the end of its file; reading stops at the end.
    """
    total = sum(sizes)
    if total <= WHOLE:
        for file, size in zip(files, sizes, strict=True):
            for start in range(0, size, 1 << 24):
                yield file, start, 1 << 24
        return
    file_starts = list(accumulate(sizes, initial=0))
    for position in _evenly_spaced(total - BLOCK + 1, BLOCKS):
        number = int(np.searchsorted(file_starts, position, side="right")) - 1
        yield files[number], position - file_starts[number], BLOCK


def _evenly_spaced(count: int, limit: int) -> list[int]:
    """Return at most `limit` evenly spaced integers, of which the first is 0 and the last is `count` - 1."""
    positions = np.linspace(0, max(0, count - 1), min(count, limit))
    return sorted({int(position) for position in positions})


def _footer(path: Path) -> bytes:
    """Return the footer of a Parquet file. It contains the offset, the size and usually the range of each column
    chunk."""
    size = path.stat().st_size
    length = int.from_bytes(_read(path, size - 8, 4), "little")  # the last 8 bytes are the length and a magic number
    return _read(path, max(0, size - 8 - length), length)


def _read(path: Path, start: int, count: int) -> bytes:
    """Return up to `count` bytes of a file from byte `start`."""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(count)


def tokenizer_hashes(tokenizer: PreTrainedTokenizerBase, folder: str | None) -> dict[str, Any]:
    """Return hashes of everything that converts rows to tokens: tokenizer, chat template and media processors.

    Args:
        tokenizer: The tokenizer of the run.
        folder: Folder with the files of the media processors; None if there is none.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    processors = "".join(path.name + path.read_text() for path in processor_files(folder))
    return {  # these keys must never change, because checkpoints store them
        "its vocabulary": _hash(repr(vocabulary)),
        "its special tokens": _hash(repr(special)),
        "its chat template": _hash(repr(tokenizer.chat_template)),
        "its definition": _hash(tokenizer.backend_tokenizer.to_str()),
        "library": version("tokenizers"),  # another version may serialize the same tokenizer differently
        "its preprocessing of media": _hash(processors),
    }


def _hash(text: str) -> str:
    """Return the hash of a text. The text may contain lone surrogates."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))
