"""`data`: sources of rows, and how they become packs."""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from omnizoo.config.doors import check_own_name
from omnizoo.config.section import LONGEST_TEXT, Object, Section, Text, _written

FEWEST_LANES, MOST_FITTING_LANES = 8, 64  # each holds some hundred samples
# How prompts, answers, texts and media are written in rows: data/formats.py has a rule for each.
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


class Source(Section):
    path: Text | None = Field(
        None,
        description="JSONL, CSV, Parquet or WebDataset tar file, a folder of them, or a local `datasets` folder; or an "
        "address that fsspec reads: `hf://datasets/...`, `s3://...` (copied to `data.cache_dir`)",
    )
    weight: Annotated[float, Field(gt=0, le=1e12)] = Field(
        1.0, description="share of samples, relative to the other sources"
    )
    split: Text = Field("train", description="split to read when the path is a `datasets` folder")
    take: Text | None = Field(
        None,
        description="a part of its rows: `every 50th`, or the others, `all but every 50th`: so one file is trained on "
        "and, in `data.eval_sources`, held out",
    )
    format: RowFormat | None = Field(
        None, description="how its rows are written, where that cannot be told from their fields (docs/data.md)"
    )
    columns: dict[Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)], Text] = Field(
        {}, description="fields under another name, as `{name here: name in the rows}`: `{text: body}`"
    )
    json_columns: list[Text] | None = Field(
        None,
        description="fields whose text is JSON; default: `messages`, `conversations`, `history`, `tools` and media",
    )
    media_dir: Text | None = Field(
        None,
        description="folder that relative paths of media in its rows start from; default: that of the data file, or of "
        "rows from Python the working directory",
    )
    rows: Text | None = Field(
        None,
        description="in place of path: `package.module:callable` of your own that gives rows: a list of dicts, a "
        "`datasets.Dataset`, a torch dataset, an `omnizoo.RowSource` (docs/extending.md)",
    )
    options: dict[str, Any] = Field({}, description="arguments of the callable in `rows`")
    given: Object = Field(
        None, description="written by `omnizoo.train(data=...)`: the kind of the rows; not set by hand"
    )

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path or self.rows or _written(self.given))

    @field_validator("rows")
    @classmethod
    def _own_rows(cls, value: str | None) -> str | None:
        return value and check_own_name(value, "a callable that gives rows; expected `package.module:callable`")

    @model_validator(mode="after")
    def _one_origin(self) -> "Source":
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


class Data(Section):
    sources: Annotated[list[Source], Field(min_length=1)] = Field(description="what to train on, mixed by weight")
    eval_sources: list[Source] = Field([], description="held-out data for `train.eval_every`")
    pack_tokens: Annotated[int, Field(ge=2, le=2**30)] = Field(2048, description="upper bound of tokens in one pack")
    lanes: Annotated[int, Field(ge=1, le=2**16)] = Field(
        FEWEST_LANES,
        description="independent streams of packs; fix the order of data for any world size; best a multiple of it. "
        "Not set: what fits `train.global_batch` (docs/data.md)",
    )
    look_ahead: Annotated[int, Field(ge=1, le=2**16)] | None = Field(
        None,
        description="samples a lane looks at to fill a pack. Default: 256, or more where they are short: two packs of "
        "them; a lane's first packs look at fewer, so that a run starts soon",
    )
    overlong: Literal["truncate", "drop", "split"] | None = Field(
        None,
        description="samples longer than a pack: cut off at its end (media stay whole), left out, or cut into pieces; "
        "counted either way. Default: `split` for plain text, `truncate` for chats and whatever has a prompt",
    )
    min_targets: Annotated[int, Field(ge=0, le=2**30)] = Field(
        0, description="samples with fewer tokens that the loss is on are left out, and counted"
    )
    shuffle: bool = Field(True, description="new order each epoch, drawn from `train.seed`")
    shuffle_rows: Annotated[int, Field(ge=1, le=10**12)] = Field(
        4096, description="rows a lane shuffles among each other"
    )
    append_eos: bool = Field(True, description="end every `text` row with the tokenizer's end-of-sequence token")
    on_bad_row: Literal["error", "skip"] = Field(
        "error", description="a row that cannot be used: stop, or count it, list it in `bad_rows.jsonl` and go on"
    )
    ignore: list[str] = Field(
        [],
        description="fields of rows, messages and content parts that may go unread, by name or glob pattern; a pattern "
        "never hides a field that is read",
    )
    media_outside: bool = Field(
        False, description="allow rows to name media files outside of their source's folder (`media_dir`)"
    )
    cache_dir: Text | None = Field(
        None, description="folder for files of sources that are elsewhere (`hf://...`); default: `~/.cache/omnizoo`"
    )
    workers: Annotated[int, Field(ge=0, le=256)] | None = Field(
        None,
        description="loader processes per rank; the data does not depend on it. Default: one for every four cores that "
        "the rank has, at most 4; 0: rows are read between steps",
    )
    prefetch: Annotated[int, Field(ge=1, le=1024)] = Field(2, description="steps each loader worker works ahead")


def fitting_lanes(global_batch: int) -> int:
    """Lanes for any number of ranks that shares out such a batch: a divisor of it, or a multiple where that is small.
    Of the config alone, since the order of the data must not depend on the world."""
    divisor = max(n for n in range(1, MOST_FITTING_LANES + 1) if global_batch % n == 0)
    return divisor * -(-FEWEST_LANES // divisor)
