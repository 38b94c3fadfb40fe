"""Keys of `data`: sources of rows, and how rows become packs."""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from omnizoo.config.plugins import plugin
from omnizoo.config.sections.base import ConfigSection, Object, PositiveInt, Text, to_plain

FEWEST_LANES = 8
MOST_FITTING_LANES = 64  # each lane buffers a few hundred samples
# Schemas of rows: which fields contain prompts, responses, texts and media.
RowFormat = Literal[
    "messages",
    "text",
    "preference",
    "alpaca",
    "prompt_completion",
    "query_response",
    "caption",
    "from_caption",
    "document",
]
ROW_FORMATS: tuple[str, ...] = get_args(RowFormat)


class SourceSettings(ConfigSection):
    path: Text | None = None
    """JSONL, CSV, Parquet or WebDataset tar file, a folder of them, or a local `datasets` folder; or an fsspec address,
    `hf://datasets/...` or `s3://...`, which is copied to `data.cache_dir`"""

    weight: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    """relative share of samples among the sources"""

    split: Text = "train"
    """split to read if the path is a `datasets` folder"""

    take: Text | None = None
    """subset of the rows: `every 50th`, or the other rows, `all but every 50th`; one file can contain training data
    and, in `data.eval_sources`, held-out data"""

    format: RowFormat | None = None
    """schema of the rows, if their fields are ambiguous (docs/data.md)"""

    columns: dict[Text, Text] = Field({})
    """renamed fields, as `{our name: name in the rows}`: `{text: body}`"""

    json_columns: list[Text] | None = None
    """fields that contain JSON as text; default: `messages`, `conversations`, `history`, `tools`, media"""

    media_dir: Text | None = None
    """folder for relative media paths in the rows; default: the folder of the data file, or the working directory for
    rows from Python"""

    rows: Annotated[Text, plugin("a callable that gives rows; expected `package.module:callable`")] | None = None
    """instead of path: your own `package.module:callable` that returns a list of dicts, a `datasets.Dataset`, a torch
    dataset or an `omnizoo.RowSource` (docs/extending.md)"""

    options: dict[str, Any] = Field({})
    """arguments of the callable in `rows`"""

    given: Object = None
    """set by `omnizoo.train(data=...)`: the class of the rows; not set by hand"""

    @property
    def name(self) -> str:
        """Name of the source in messages."""
        return str(self.path or self.rows or to_plain(self.given))

    @model_validator(mode="after")
    def _check_source(self) -> "SourceSettings":
        origins = sum(origin is not None for origin in (self.path, self.rows, self.given))
        if origins != 1:
            what = "path is missing, and so is" if not origins else "a source has one of path and"
            raise ValueError(f"{what} rows; expected a file or folder as path, or `package.module:callable` as rows")
        if self.options and self.rows is None:
            raise ValueError("options are arguments of the callable in rows, which is not set")
        if self.take is not None and not re.fullmatch("(all but )?every [1-9][0-9]{0,8}(st|nd|rd|th)", self.take):
            raise ValueError(f"take is {self.take!r}; expected `every 50th` or `all but every 50th`, of any number")
        if self.take is not None and re.search(" 1[a-z]+$", self.take):
            raise ValueError(f"take is {self.take!r}: all rows, or none; expected a number from 2 on")
        if twice := [name for name in self.columns.values() if list(self.columns.values()).count(name) > 1]:
            raise ValueError(f"columns reads {twice[0]!r} under two names; a field has one")
        return self


class DataSection(ConfigSection):
    sources: Annotated[list[SourceSettings], Field(min_length=1)]
    """training data, mixed by weight"""

    eval_sources: list[SourceSettings] = Field([])
    """held-out data for evaluations"""

    pack_tokens: Annotated[int, Field(ge=2, le=2**30)] = 2048
    """maximum number of tokens in a pack, and so of a sample"""

    lanes: Annotated[int, Field(ge=1, le=2**16)] = FEWEST_LANES
    """number of independent streams of packs, which make the order of the data independent of the world size; best a
    multiple of it. Default: fits `train.packs_per_step` (docs/data.md)"""

    look_ahead: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """number of samples from which a lane fills a pack. Default: 256, or more if samples are short: those of two packs;
    the first packs of a lane use fewer, so that a run starts soon"""

    overlong: Literal["truncate", "drop", "split"] | None = None
    """samples longer than a pack: `truncate` at the end (without splitting media), `drop`, or `split` into several
    samples; they are counted. Default: `split` for plain text, `truncate` for chats and prompts"""

    min_targets: Annotated[int, Field(ge=0, le=2**30)] = 0
    """minimum number of target tokens; samples with fewer are dropped and counted"""

    shuffle: bool = True
    """shuffle the rows in each epoch, with random numbers from `train.seed`"""

    shuffle_rows: PositiveInt = 4096
    """number of rows in the shuffle buffer of a lane"""

    append_eos: bool = True
    """end every `text` row with the tokenizer's end-of-sequence token"""

    on_bad_row: Literal["error", "skip"] = "error"
    """on a row that cannot be used: stop, or count it, list it in `bad_rows.jsonl` and continue"""

    ignore: list[str] = Field([])
    """fields of rows, messages and content parts to ignore, by name or glob pattern; a pattern does not apply to fields
    that are used"""

    media_outside: bool = False
    """allow media files outside the folder of their source (`media_dir`)"""

    cache_dir: Text | None = None
    """folder for copies of remote sources (`hf://...`); default: `~/.cache/omnizoo`"""

    workers: Annotated[int, Field(ge=0, le=256)] | None = None
    """loader processes per rank; packs do not depend on it. Default: one for every four cores of the rank, at most 4;
    0: rows are read between steps"""

    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    """number of steps that each loader worker prepares in advance"""


def fitting_lanes(packs_per_step: int) -> int:
    """Return the default number of lanes: a divisor of `packs_per_step`, or a multiple if that is small.

    It depends only on the config, because the order of the data must not depend on the world size.
    """
    divisor = max(n for n in range(1, MOST_FITTING_LANES + 1) if packs_per_step % n == 0)
    return divisor * -(-FEWEST_LANES // divisor)
