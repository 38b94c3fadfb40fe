"""Keys of `data`: sources of rows, and the conversion of rows to packs."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from omnizoo.config.hub import without_revision
from omnizoo.config.plugins import plugin
from omnizoo.config.sections.base import ConfigSection, Object, PositiveInt, Text, alternatives, to_plain

MIN_LANES = 8
SAMPLES_PER_LANE = 16  # with `train.samples_per_step`, the default gives each lane about this number in each step
MAX_FITTING_LANES = 64  # the default is not larger, because each lane buffers a few hundred samples in memory
# Schemas of rows. A schema determines which fields contain prompts, responses, texts and media.
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

# Variables of chat templates that the renderer sets itself.
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` unchanged if all keys are names of template variables that a config may set."""
    for name in options:
        if not name.isidentifier() or name.startswith("_"):
            raise ValueError(f"{name!r} is not the name of a template variable. Use a name such as enable_thinking.")
        if name in RESERVED_VARIABLES:
            raise ValueError(f"{name} cannot be an option, because it is set for each row. Remove it.")
    return options


def _check_shape(shape: str) -> str:
    """Return `shape` unchanged if it has the form `HEIGHTxWIDTH` or `HEIGHTxWIDTHxFRAMES`."""
    if not re.fullmatch(r"[1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){1,2}", shape):
        raise ValueError(f"{shape[:40]!r} is not a shape. Use a form such as 512x768, or 480x832x81 with frames.")
    return shape


MediaShape = Annotated[str, Field(min_length=3, max_length=20), AfterValidator(_check_shape)]
TemplateOptions = Annotated[dict[Text, bool | int | float | str], AfterValidator(_check_options)]


class SourceSettings(ConfigSection):
    """Settings of one source of rows."""

    exclusive: ClassVar[dict[str, tuple[str, ...]]] = alternatives(("path",), ("rows", "options"), ("given",))

    path: Text | None = None
    """Where the rows are: a JSONL, CSV, Parquet or WebDataset tar file, a folder of such files, a local `datasets`
    folder, `ORG/NAME` or `ORG/NAME@REVISION` on the Hugging Face Hub, or an fsspec address such as `s3://...`. Files at
    an address are copied to `data.cache_dir`."""

    weight: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Relative share of the source in the mix. Default: 1 if another source has a weight, otherwise the number of rows
    of the source."""

    split: Text = "train"
    """Split to read, if the source has splits: a `datasets` folder, a folder with a file for each split, or a dataset
    on the hub."""

    take: Text | None = None
    """Subset of the rows: `every 50th`, or `all but every 50th`. Use both forms to split one file into held-out and
    training data. Default: all rows."""

    format: RowFormat | None = None
    """Schema of the rows (docs/how-to/data.md). Set it if the field names are ambiguous. Default: inferred from the
    fields."""

    columns: dict[Text, Text] = Field({})
    """Fields to rename, as `{our name: name in the rows}`, such as `{text: body}`."""

    json_columns: list[Text] | None = None
    """Fields whose text is parsed as JSON. Default: `messages`, `conversations`, `history`, `tools` and the media
    fields."""

    media_dir: Text | None = None
    """Folder that relative media paths in the rows refer to. Default: the folder of the data file, or the working
    directory for rows from Python."""

    untagged_media: Literal["first"] | None = None
    """Where to put the media of a row whose texts have no tag such as `<image>`. `first` puts them at the beginning of
    the first user message. By default, such a row is a bad row."""

    rows: Annotated[Text, plugin("a callable that returns rows; expected `package.module:callable`")] | None = None
    """`package.module:callable` of a plugin, instead of `path`. It returns a list of dicts, a `datasets.Dataset`, a
    torch dataset or an `omnizoo.RowSource` (docs/how-to/plugins.md)."""

    options: dict[str, Any] = Field({})
    """Keyword arguments of the callable in `rows`."""

    given: Object = None
    """Class of the rows that were passed to `omnizoo.train(data=...)`. It is set automatically."""

    @property
    def name(self) -> str:
        """Name of the source in messages. For a dataset on the hub, it has no revision and no commit."""
        return without_revision(self.path) if self.path else str(self.rows or to_plain(self.given))

    @model_validator(mode="after")
    def _check_source(self) -> "SourceSettings":
        """Check that the rows have exactly one origin, and that `take`, `options` and `columns` are valid."""
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
            raise ValueError(f"columns: the field {repeated[0]!r} is renamed to two names. Keep one of them.")
        return self


class DataSection(ConfigSection):
    """Keys of `data`."""

    sources: Annotated[list[SourceSettings], Field(min_length=1)]
    """Training data. Rows are mixed in proportion to `weight`, or to the sizes of the sources if none has a weight."""

    eval_sources: list[SourceSettings] = Field([])
    """Held-out data for evaluations. Packs are divided among the sources in proportion to `weight`; by default, each
    source gets the same number of packs."""

    pack_tokens: Annotated[int, Field(ge=2, le=2**30)] = 2048
    """Maximum number of tokens in a pack, and therefore in a sample. `data.overlong` decides what happens to longer
    samples."""

    lanes: Annotated[int, Field(ge=1, le=2**16)] = MIN_LANES
    """Number of independent streams of packs. Because each stream is the same for any number of ranks, the order of the
    data does not depend on the world size. Use a multiple of the world size. Default: a number between 8 and 64 that
    fits `train.packs_per_step` or `train.samples_per_step` (docs/explanation/packing.md)."""

    look_ahead: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Number of samples among which a lane selects the samples of the next pack. More samples fill packs better and
    need more memory. Default: 256, or enough samples for two packs if that is more. The first packs of a lane use fewer
    samples, so the run starts quickly."""

    overlong: Literal["truncate", "drop", "split"] | None = None
    """What happens to a sample that is longer than a pack: `truncate` removes its end without cutting through media,
    `drop` removes the sample, `split` divides it into several samples. Default: `split` for plain text, `truncate` for
    chats and prompts."""

    min_targets: Annotated[int, Field(ge=0, le=2**30)] = 0
    """Minimum number of targets in a sample. Samples with fewer targets are dropped and counted."""

    shuffle: bool = True
    """Whether to shuffle the rows in each epoch. The order depends on `train.seed`."""

    shuffle_rows: PositiveInt = 4096
    """Number of consecutive rows that a lane shuffles together. Increase it if neighboring rows are similar."""

    append_eos: bool = True
    """Whether each row of format `text` ends with the tokenizer's end-of-sequence token."""

    on_bad_row: Literal["error", "skip"] = "error"
    """What happens when a row cannot be used: `error` stops the run, `skip` counts the row, lists it in
    `bad_rows.jsonl` and continues."""

    ignore: list[str] = Field([])
    """Fields of rows, messages and content parts to ignore, as names or glob patterns. A name also matches fields that
    are used; a pattern only matches fields that nothing uses."""

    chat_template: Text | None = None
    """File with a Jinja chat template that replaces the tokenizer's chat template. Set it for a base model without a
    chat template. The template is saved with checkpoints and exports."""

    template_options: TemplateOptions = Field({})
    """Variables for the chat template, such as `{enable_thinking: false}`. They apply to training, evaluation and
    generation, and are saved as defaults in the chat template of checkpoints and exports."""

    thinking: Literal["template", "keep", "drop", "refuse"] = "template"
    """What happens to reasoning in earlier turns if the chat template removes it. `template` trains each such turn as a
    separate sample that ends with the turn. `keep` writes the reasoning in all turns. `drop` removes all reasoning from
    the rows. `refuse` makes the row a bad row (docs/how-to/chat_templates.md)."""

    thinking_tags: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None
    """Text before and after the reasoning of a message, such as `["<think>\\n", "\\n</think>\\n\\n"]`. Set it if the
    chat template reads reasoning from the content: `reasoning_content` is then written there, between the tags."""

    shapes: Annotated[list[MediaShape], Field(min_length=1)] | None = None
    """Shapes of the media that a diffusion transformer learns to generate, as `HEIGHTxWIDTH` or `HEIGHTxWIDTHxFRAMES`.
    Each item is resized and cropped to the shape that is nearest in aspect ratio, among those with the most frames that
    it can fill. Required for rows with media files; latents keep their shape."""

    crop: Literal["center", "random"] = "center"
    """Part of a resized item that is kept: the center, or a position that depends on `train.seed`, the epoch and the
    row."""

    frame_rate: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Frames per second that are sampled for a shape with frames. Default: all frames of the file."""

    text_tokens: PositiveInt | None = None
    """Maximum number of text tokens of a prompt, for a diffusion transformer. Default: the number that the pipeline of
    the family uses."""

    text_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of samples whose prompt is replaced by the empty prompt, for a diffusion transformer. Sampling with
    classifier-free guidance needs it. Which samples they are depends on `train.seed`, the epoch and the row."""

    media_outside: bool = False
    """Whether rows may refer to media files outside `media_dir`, or outside the folder of the source. By default, such
    a row is a bad row."""

    cache_dir: Text | None = None
    """Folder for copies of remote sources, such as `s3://...`. Default: `~/.cache/omnizoo`."""

    workers: Annotated[int, Field(ge=0, le=256)] | None = None
    """Number of loader processes of each rank. It does not change the packs. Increase it if steps wait for data. With
    0, the training process reads the rows between steps. Default: one process for every four cores of the rank, at most
    4."""

    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    """Number of steps that each loader worker prepares in advance. A larger value bridges longer delays in reading and
    needs more memory."""

    @property
    def weights(self) -> list[float] | None:
        """Weight of each source; None if no source has one. The shares are then proportional to the numbers of rows."""
        if all(source.weight is None for source in self.sources):
            return None
        return [source.weight or 1.0 for source in self.sources]


def with_weights(sources: Sequence[SourceSettings]) -> list[SourceSettings]:
    """Return copies of the sources in which a missing weight is replaced by 1."""
    return [source.model_copy(update={"weight": source.weight or 1.0}) for source in sources]


def fitting_lanes(packs_per_step: int) -> int:
    """Return the default number of lanes.

    It is the largest divisor of `packs_per_step` up to `MAX_FITTING_LANES`, or a multiple of that divisor if it is
    smaller than `MIN_LANES`. It depends only on the config, because the order of the data must not depend on the world
    size.
    """
    largest_divisor = max(n for n in range(1, MAX_FITTING_LANES + 1) if packs_per_step % n == 0)
    factor = math.ceil(MIN_LANES / largest_divisor)
    return largest_divisor * factor
