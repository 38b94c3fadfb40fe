"""Keys of `data`: sources of rows, and how rows become packs."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from omnizoo.config.hub import without_revision
from omnizoo.config.plugins import plugin
from omnizoo.config.sections.base import ConfigSection, Object, PositiveInt, Text, alternatives, to_plain

MIN_LANES = 8
MAX_FITTING_LANES = 64  # each lane buffers a few hundred samples
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
    "tokenized",
]
ROW_FORMATS: tuple[str, ...] = get_args(RowFormat)


RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # variables of chat templates


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Check that the options are names of variables that a chat template may set."""
    for name in options:
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"{name!r} is not the name of a template variable. Use a name such as enable_thinking.")
        if name in RESERVED_VARIABLES:
            raise ValueError(f"{name} is set by OmniZoo. Remove it.")
    return options


TemplateOptions = Annotated[dict[Text, bool | int | float | str], AfterValidator(_check_options)]


class SourceSettings(ConfigSection):
    """Settings of one source of rows."""

    exclusive: ClassVar[dict[str, tuple[str, ...]]] = alternatives(("path",), ("rows", "options"), ("given",))

    path: Text | None = None
    """JSONL, CSV, Parquet or WebDataset tar file, a folder of such files, a local `datasets` folder, a dataset on the
    Hugging Face Hub (`ORG/NAME` or `ORG/NAME@REVISION`), or an fsspec address (`s3://...`) to copy to
    `data.cache_dir`"""

    weight: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """relative share of rows among the sources; default: 1 if another source has a weight, otherwise the number of rows
    of the source"""

    split: Text = "train"
    """split to read, if the path is a `datasets` folder"""

    take: Text | None = None
    """subset of the rows, `every 50th` or `all but every 50th`, to split one file into training and held-out data;
    default: all rows"""

    format: RowFormat | None = None
    """schema of the rows (docs/how-to/data.md); default: inferred from the fields"""

    columns: dict[Text, Text] = Field({})
    """renamed fields as `{our name: name in the rows}`, such as `{text: body}`"""

    json_columns: list[Text] | None = None
    """fields that contain JSON as text; default: `messages`, `conversations`, `history`, `tools`, media fields"""

    media_dir: Text | None = None
    """folder for relative media paths in the rows; default: the folder of the data file, or the working directory for
    rows from Python"""

    untagged_media: Literal["first"] | None = None
    """position of media in a column if no text of the row has a tag such as `<image>` for them: `first` places them at
    the beginning of the first user message; default: such rows are bad rows"""

    rows: Annotated[Text, plugin("a callable that returns rows; expected `package.module:callable`")] | None = None
    """`package.module:callable` of a plugin, instead of `path`, that returns a list of dicts, a `datasets.Dataset`, a
    torch dataset or an `omnizoo.RowSource` (docs/how-to/plugins.md)"""

    options: dict[str, Any] = Field({})
    """arguments of the callable in `rows`"""

    given: Object = None
    """class of the rows that were passed to `omnizoo.train(data=...)`; set automatically"""

    @property
    def name(self) -> str:
        """Name of the source in messages, without the commit of a dataset on the hub."""
        return without_revision(self.path) if self.path else str(self.rows or to_plain(self.given))

    @model_validator(mode="after")
    def _check_source(self) -> "SourceSettings":
        num_origins = sum(origin is not None for origin in (self.path, self.rows, self.given))
        if num_origins != 1:
            mistake = "path and rows are both set" if num_origins else "path and rows are both missing"
            raise ValueError(f"{mistake}. Set a file or folder as path, or `package.module:callable` as rows.")
        if self.options and self.rows is None:
            raise ValueError("options are arguments of the callable in rows, but rows is not set. Remove options.")
        if self.take is not None and not re.fullmatch("(all but )?every [1-9][0-9]{0,8}(st|nd|rd|th)", self.take):
            raise ValueError(f"take is {self.take!r}; expected a form such as `every 50th` or `all but every 50th`")
        if self.take is not None and re.search(" 1[a-z]+$", self.take):
            raise ValueError(f"take is {self.take!r}, which selects all rows or none; expected a number from 2")

        field_names = list(self.columns.values())
        repeated = [name for name in field_names if field_names.count(name) > 1]
        if repeated:
            raise ValueError(f"columns: the field {repeated[0]!r} is used under two names. Keep one of them.")
        return self


class DataSection(ConfigSection):
    """Keys of `data`."""

    sources: Annotated[list[SourceSettings], Field(min_length=1)]
    """training data, mixed by `weight`, or by size if no source has a weight"""

    eval_sources: list[SourceSettings] = Field([])
    """held-out data for evaluations, which is read in proportion to `weight` (default: equal numbers of packs)"""

    pack_tokens: Annotated[int, Field(ge=2, le=2**30)] = 2048
    """maximum number of tokens of a pack, and of the longest sample"""

    lanes: Annotated[int, Field(ge=1, le=2**16)] = MIN_LANES
    """number of independent streams of packs, which make the order of the data independent of the world size; should be
    a multiple of the world size; default: fits `train.packs_per_step` (docs/how-to/data.md)"""

    look_ahead: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """number of candidate samples from which a lane fills a pack; default: 256, or enough samples for two packs,
    whichever is larger; by default, the first packs of a lane use fewer candidates, so that a run starts quickly"""

    overlong: Literal["truncate", "drop", "split"] | None = None
    """treatment of samples longer than a pack: `truncate` at the end (without splitting media), `drop`, or `split` into
    several samples; default: `split` for plain text, `truncate` for chats and prompts"""

    min_targets: Annotated[int, Field(ge=0, le=2**30)] = 0
    """minimum number of target tokens of a sample; samples with fewer targets are dropped and counted"""

    shuffle: bool = True
    """whether to shuffle the rows in each epoch, with random numbers from `train.seed`"""

    shuffle_rows: PositiveInt = 4096
    """number of rows in the shuffle buffer of a lane"""

    append_eos: bool = True
    """whether to end every `text` row with the tokenizer's end-of-sequence token"""

    on_bad_row: Literal["error", "skip"] = "error"
    """action on a bad row: `error` stops the run, `skip` counts the row, lists it in `bad_rows.jsonl` and continues"""

    ignore: list[str] = Field([])
    """names or glob patterns of fields of rows, messages and content parts to ignore; a pattern does not match fields
    that are used"""

    chat_template: Text | None = None
    """file with a chat template (Jinja) instead of that of the tokenizer, for example for a base model without one; it
    is saved with checkpoints and exports"""

    template_options: TemplateOptions = Field({})
    """arguments of the chat template as `{name: value}`, such as `{enable_thinking: false}`, for training, evaluation
    and generation; they are saved as defaults in the chat template of checkpoints and exports"""

    thinking: Literal["template", "keep", "drop", "refuse"] = "template"
    """treatment of reasoning that the chat template drops from earlier turns: `template` trains such a turn as a sample
    of its own, which ends with the turn; `keep` writes it in all turns; `drop` removes all reasoning from the rows;
    `refuse` makes the row a bad row (docs/how-to/chat_templates.md)"""

    thinking_tags: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None
    """text before and after the reasoning of a message, such as `["<think>\\n", "\\n</think>\\n\\n"]`, to write
    `reasoning_content` into the content, for chat templates that read reasoning there"""

    media_outside: bool = False
    """whether media files may be outside the folder of the source (`media_dir`); default: an error"""

    cache_dir: Text | None = None
    """folder for copies of remote sources (`hf://...`); default: `~/.cache/omnizoo`"""

    workers: Annotated[int, Field(ge=0, le=256)] | None = None
    """number of loader processes per rank, which does not change the packs; default: one for every four cores of the
    rank, at most 4; 0: rows are read between steps"""

    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    """number of steps that each loader worker prepares in advance"""

    @property
    def weights(self) -> list[float] | None:
        """The weights of the sources; None if no source has one, so that each share is the share of all rows."""
        if all(source.weight is None for source in self.sources):
            return None
        return [source.weight or 1.0 for source in self.sources]


def with_weights(sources: Sequence[SourceSettings]) -> list[SourceSettings]:
    """Return the sources with a weight of 1 for those without a weight."""
    return [source.model_copy(update={"weight": source.weight or 1.0}) for source in sources]


def fitting_lanes(packs_per_step: int) -> int:
    """Return the default number of lanes: a divisor of `packs_per_step`, or a multiple if `packs_per_step` is small.

    The number depends only on the config, because the order of the data must not depend on the world size.
    """
    largest_divisor = max(n for n in range(1, MAX_FITTING_LANES + 1) if packs_per_step % n == 0)
    factor = math.ceil(MIN_LANES / largest_divisor)
    return largest_divisor * factor
