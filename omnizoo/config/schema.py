"""The config schema: one frozen section per room, every key typed, documented and with its default.

A run is a function of this config without `parallel` (and without `log`): the layout never changes what is computed.
`docs/configuration.md` and `omnizoo train --help` are generated from these fields.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from omnizoo.config.doors import check_name, check_own_name
from omnizoo.config.loss_kinds import LOSSES, OF_ROUTERS, PAIRWISE, PREFERENCES, default_name
from omnizoo.config.optimizers import OPTIMIZERS, check_optimizer_options
from omnizoo.config.options import check_options

SCHEDULES = ("constant", "linear", "cosine", "wsd")
METRICS = ("accuracy", "exact_match")

FEWEST_LANES, MOST_FITTING_LANES = 8, 64  # each holds `data.look_ahead` samples from the start
LONGEST_TEXT = 4096  # no path is longer
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)]
Rate = Annotated[float, Field(gt=0, le=1000)]  # of learning
Weight = Annotated[float, Field(ge=0, le=1e6)]  # of a loss
Count = Annotated[int, Field(ge=1, le=2**20)]  # of ranks, or of packs in a step
Decay = Annotated[float, Field(ge=0, le=1000)]  # of weights
Steps = Annotated[int, Field(ge=0, le=10**12)]
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


@dataclass(frozen=True, eq=False)
class Given:
    """An object that `omnizoo.train` was given from Python. A file holds its name in its place."""

    value: Any = field(repr=False)
    name: str


def _written(value: Any) -> Any:
    return value.name if isinstance(value, Given) else value


Object = Annotated[Text | Given | None, PlainSerializer(_written)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        arbitrary_types_allowed=True,  # `Given`
    )


class Part(Section):
    """A piece of a model with weights of its own."""

    path: Text | None = Field(None, description="HF folder with its pretrained weights")
    config: Text | dict[str, Any] | None = Field(
        None, description="HF folder or inline mapping (with `model_type`); weights are drawn from `train.seed`"
    )
    freeze: bool = Field(False, description="do not train it")
    lr: Rate | None = Field(None, description="peak learning rate; default: `train.lr`")
    dtype: Literal["fp32", "bf16"] | None = Field(
        None, description="precision its weights are kept in; other than the run's own: frozen parts only"
    )
    recompute: Literal["none", "full", "selective"] | None = Field(
        None, description="recompute its activations in backward; default: `parallel.recompute`"
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "Part":
        if self.path is not None and self.config is not None:
            raise ValueError("give one of path (weights) and config (random init), not both")
        if isinstance(self.config, dict) and "model_type" not in self.config:
            raise ValueError("config as a mapping needs a `model_type`; arguments of a class go into `options`")
        return self


class EncoderPart(Part):
    kind: Text | None = Field(
        None, description="built-in name, or `package.module:Class` of your own; a published model has its own"
    )
    options: dict[str, Any] = Field({}, description="arguments of the class: sizes, budgets such as `max_pixels`, ...")


class DecoderPart(EncoderPart):
    weight: Weight = Field(1.0, description="weight of its loss")


class Projector(Section):
    kind: Literal["linear", "mlp", "pixel_shuffle", "resampler"] = Field(
        "mlp", description="what takes the encoder's rows to the foundation's width"
    )
    options: dict[str, Any] = Field({}, description="its arguments: `factor` of pixel_shuffle, `rows` of resampler")
    freeze: bool = Field(False, description="do not train it")
    lr: Rate | None = Field(None, description="peak learning rate; default: `train.lr`")

    @model_validator(mode="after")
    def _kind_once(self) -> "Projector":
        if "kind" in self.options:
            raise ValueError("kind is no option; it is a key of its own, next to options")
        return self


class Marks(Section):
    begin: Text | None = Field(None, description="token before an item; default: `<|NAME_begin|>`, added if it is new")
    placeholder: Text | None = Field(None, description="token at the item's places; default: `<|NAME_pad|>`")
    end: Text | None = Field(None, description="token after an item; default: `<|NAME_end|>`")


class Modality(Section):
    encoder: EncoderPart | None = Field(None, description="how items of this modality come in")
    projector: Projector | None = Field(None, description="between a built-in encoder and the foundation")
    decoder: DecoderPart | None = Field(None, description="how the model produces items of this modality")
    marks: Marks = Field(default_factory=Marks, description="the special tokens around and in the place of an item")


class Adapter(Section):
    kind: Literal["lora", "dora", "rslora"] = Field(
        "lora", description="`dora` learns the length of each row as well; `rslora` scales by alpha / sqrt(rank)"
    )
    rank: Annotated[int, Field(ge=1, le=2**16)] = Field(16, description="width of the factors")
    alpha: Annotated[float, Field(gt=0, le=1e6)] = Field(32.0, description="what is added is scaled by alpha / rank")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of what enters the factors, in training")
    targets: Annotated[list[Text], Field(min_length=1)] = Field(
        ["all-linear"],
        description="what gets factors: `all-linear` (the linear layers of the language model's blocks), ends of names "
        "such as `q_proj` or `experts.down_proj`, or glob patterns over full names (docs/adapters.md)",
    )
    exclude: list[Text] = Field([], description="what of `targets` gets none, named in the same way")
    modules_to_save: list[Text] = Field([], description="modules that are trained whole, named in the same way")
    init: Literal["kaiming", "gaussian", "random"] = Field(
        "kaiming",
        description="how the first factor is drawn; the second is zero, so that the model begins as its base "
        "(`random`: drawn as well)",
    )
    base: Literal["nf4", "int8"] | None = Field(
        None,
        description="hold the frozen linear layers and experts of the language model in 4 (`nf4`, as QLoRA) or 8 bits; "
        "None: in the precision of the run",
    )
    path: Text | None = Field(
        None,
        description="folder of a PEFT adapter to begin with: all keys but `dropout` and `base` are those of its files",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "Adapter":
        fields = type(self).model_fields
        others = [name for name in fields if name not in ("path", "dropout", "base")]
        given = [name for name in others if getattr(self, name) != fields[name].default]
        if self.path is not None and given:
            raise ValueError(f"path has an adapter with a {given[0]} of its own; leave out {', '.join(given)}")
        return self


class Model(Section):
    path: Text | None = Field(None, description="HF folder with config, safetensors weights and tokenizer")
    config: Text | dict[str, Any] | None = Field(
        None, description="HF folder or inline mapping (with `model_type`); weights are drawn from `train.seed`"
    )
    module: Text | None = Field(
        None,
        description="`package.module:callable` that builds your own torch module; it gets `model.config` as arguments",
    )
    given: Object = Field(
        None,
        description="written by `omnizoo.train(model=...)`: the class of the object that was trained; not set by hand",
    )
    recipe: Text | None = Field(
        None,
        description="`package.module:RECIPE` of your own: an `omnizoo.Recipe` with facts of the family, in place "
        "of the built-in one (docs/extending.md)",
    )
    foundation: Part | None = Field(
        None, description="in place of path and config: the causal language model of a composed omni model"
    )
    modalities: dict[str, Modality] = Field(
        {}, description="what a composed model reads and produces, by content type; or options of a published one's own"
    )
    part: Text | None = Field(
        None, description="of a published model of several, the one to train: its key in config.json"
    )
    freeze: list[Text] = Field(
        [],
        description="what is not trained: names or ends of names of modules and parameters (`embed_tokens`), or glob "
        "patterns over full names (`model.layers.[0-3].*`)",
    )
    tokenizer: Object = Field(None, description="folder of the HF tokenizer; default: the model's own folder")
    resize_vocabulary: bool | None = Field(
        None,
        description="give embedding and head rows for tokens that have none: published rows stay, new ones are drawn "
        "from `train.seed` (docs/checkpoints.md); default: of composed models, for the marks of their modalities",
    )
    attention: Text = Field(
        "auto",
        description="`auto`: the fastest exact packed kernel for the device; or a transformers implementation by name",
    )
    text_only: bool = Field(
        False,
        description="allow a model that reads more than text, and has no recipe for that, to be trained on text alone",
    )
    trust_remote_code: bool = Field(False, description="run Python code that ships inside the model folder")
    allow_code: list[Text] = Field(
        [],
        description="Python modules (and those below them) that a composed model's folder may name as its encoders and "
        "decoders; what this config names itself needs no leave",
    )
    allow_missing: list[Text] = Field(
        [], description="glob patterns of weights that `model.path` may lack; they are drawn from `train.seed`"
    )
    allow_unexpected: list[Text] = Field([], description="glob patterns of weights in `model.path` to ignore")
    adapter: Adapter | None = Field(
        None, description="train small factors next to the weights, which stay as they are (docs/adapters.md)"
    )

    @field_validator("recipe")
    @classmethod
    def _own_recipe(cls, value: str | None) -> str | None:
        return value and check_own_name(value, "a recipe; expected `package.module:RECIPE`")

    @model_validator(mode="after")
    def _one_origin(self) -> "Model":
        possible = (self.path, self.config, self.foundation, self.given)
        origins = [origin for origin in possible if origin is not None]
        if len(origins) != 1:
            raise ValueError(
                "give exactly one of model.path (weights), model.config (random init) and model.foundation (composed)"
            )
        if self.foundation is not None:
            self._is_composed(self.foundation)
        if self.given is not None and (self.module is not None or self.part is not None):
            raise ValueError("model.given is a whole model: it has no model.module and no model.part")
        if self.resize_vocabulary and (self.given is not None or self.module is not None):
            raise ValueError(
                "model.resize_vocabulary: a model of your own has the vocabulary that you made it with; resize it "
                "there, and leave the key out"
            )
        if self.module is not None:
            if not isinstance(self.config, dict) or ":" not in self.module:
                raise ValueError(
                    "model.module is `package.module:callable`, and its arguments are a mapping in model.config"
                )
        elif isinstance(self.config, dict) and "model_type" not in self.config:
            raise ValueError("model.config as a mapping needs a `model_type`, e.g. `model_type: qwen3`")
        return self

    def _is_composed(self, foundation: Part) -> None:
        if (foundation.path is None) == (foundation.config is None):
            raise ValueError("model.foundation needs a path (weights) or a config (random init)")
        if self.module is not None:
            raise ValueError("model.module is a whole model: it has no model.foundation")
        for name, modality in self.modalities.items():
            if not name.isidentifier() or name in ("text", "tool", "message", "conversation"):  # fields of rows
                raise ValueError(f"model.modalities.{name} cannot be a modality's name; use letters, digits and _")
            if modality.encoder is None and modality.decoder is None:
                raise ValueError(f"model.modalities.{name} needs an encoder or a decoder")
            for role, part in (("encoder", modality.encoder), ("decoder", modality.decoder)):
                if part is not None and part.kind is None:
                    raise ValueError(
                        f"model.modalities.{name}.{role} needs a kind: a built-in name, or `package.module:Class`"
                    )


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
    look_ahead: Annotated[int, Field(ge=1, le=2**16)] = Field(256, description="samples a lane looks at to fill a pack")
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


class RecomputeBudget(Section):
    budget: Annotated[float, Field(gt=0, le=1e6)] = Field(
        description="what activations of blocks may take on a rank: up to 1, a share of its memory; above, GiB"
    )


class Parallel(Section):
    dp_replicate: Count = Field(1, description="copies of the sharded model (HSDP)")
    dp_shard: Annotated[int, Field(le=2**20)] = Field(
        -1, description="ranks with packs of their own that share one copy (FSDP2); -1: what is left"
    )
    ulysses: Count = Field(
        1, description="ranks that share a pack and split its attention by heads (sequence parallel, all-to-all)"
    )
    ring: Count = Field(
        1, description="ranks that share a pack and pass keys and values around (sequence parallel, any head count)"
    )
    ep: Count = Field(1, description="ranks that split the experts; divides dp_shard x ulysses x ring")
    overlap: bool = Field(
        True,
        description="start the all-to-alls of query, key and value together; false: one by one, same numbers",
    )
    precision: Literal["fp32", "fp64", "bf16"] = Field(
        "fp32",
        description="bf16 keeps fp32 master weights and reduces gradients in fp32, and is what accelerators do unless "
        "this says otherwise; fp64 is for proofs on the CPU",
    )
    recompute: Literal["none", "full", "selective"] | RecomputeBudget = Field(
        "none",
        description="recompute activations in backward: whole blocks, or all but attention, matmuls and all-to-alls; "
        "or `{budget: 40}`: as few blocks as it allows, by costs that are measured at the start (docs/memory.md)",
    )
    offload: list[Literal["activations", "optimizer"]] = Field(
        [],
        max_length=8,
        description="what is kept in the memory of the host instead of the device's: `activations` come back one block "
        "ahead in backward, the state of the `optimizer` is away but for the update (docs/memory.md)",
    )
    tile_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        None,
        description="feed-forwards and experts compute at most so many tokens at a time, and once more in backward: "
        "what they keep does not grow with the pack (docs/memory.md); default: all at once",
    )
    reshard_after_forward: bool | None = Field(
        None,
        description="free gathered weights between forward and backward: less memory, one more all-gather; default: "
        "unless all of them take less than a sixteenth of the memory",
    )
    reduce_each_micro_batch: bool | None = Field(
        None,
        description="reduce-scatter after every micro-batch: less memory, more communication; default: on accelerators "
        "(on CPUs once a step)",
    )

    @model_validator(mode="after")
    def _shard_is_a_size(self) -> "Parallel":
        if self.dp_shard == 0 or self.dp_shard < -1:
            raise ValueError(f"parallel.dp_shard is {self.dp_shard}; give a positive number, or -1 for what is left")
        return self


class EarlyStop(Section):
    metric: Text = Field(
        "eval/loss",
        description="which metric of evaluations; lower is better, unless `evaluation.metrics` say otherwise",
    )
    patience: Annotated[int, Field(ge=1, le=10**12)] = Field(
        3, description="evaluations in a row without a better one, after which the run ends"
    )
    min_delta: Annotated[float, Field(ge=0, le=1e12)] = Field(
        0.0, description="what is lower (or higher) by no more than this is not better"
    )


class LossPart(Section):
    kind: Text = Field(
        "cross_entropy",
        description="`cross_entropy` of the text; `dpo`, `orpo`, `simpo`, `kto` of preferences (docs/preferences.md); "
        "`grpo` and `gspo` of rollouts (docs/rl.md); "
        "`balance` and `router_z` of a mixture of experts; or `package.module:Class` of your own, a subclass of "
        "`omnizoo.Loss`",
    )
    weight: Weight = Field(1.0, description="what it is multiplied by; 0: a metric only")
    options: dict[str, Any] = Field(
        {},
        description="its arguments (docs/losses.md), or those of your class",
    )
    name: Annotated[str, Field(min_length=1, max_length=80)] | None = Field(
        None,
        description="its metric is `loss/NAME`; default: `text` for cross_entropy, else its kind, or the name of your "
        "class in lower case",
    )

    @property
    def label(self) -> str:
        return self.name or default_name(self.kind)

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        return check_name(value, LOSSES, "loss")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is not None and not value.isidentifier():
            raise ValueError(f"{value!r} cannot be the name of a metric; use letters, digits and _")
        return value


class Train(Section):
    steps: Annotated[int, Field(ge=1, le=10**12)] = Field(1000, description="optimizer steps of the whole run")
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = Field(
        None,
        description="in place of steps: how often every row is read; packs are counted before the run (docs/data.md)",
    )
    global_batch: Count = Field(8, description="packs per optimizer step over all ranks")
    batch_tokens: Annotated[int, Field(ge=2, le=2**50)] | None = Field(
        None, description="in place of global_batch: tokens per optimizer step, a multiple of `data.pack_tokens`"
    )
    micro_batch: Count = Field(1, description="packs per forward pass on one rank")
    lr: Rate = Field(3e-4, description="peak learning rate")
    schedule: Text = Field(
        "cosine",
        description="after warmup: `constant`, to `min_lr_ratio` by a line (`linear`) or a `cosine`, or `wsd`: "
        "warmup-stable-decay; or `package.module:function` of your own: (train config, step) -> learning rate",
    )
    warmup_steps: Steps = Field(0, description="steps of linear warmup from zero")
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="in place of warmup_steps: share of the run's steps, rounded up"
    )
    decay_steps: Steps = Field(0, description="`wsd` only: steps of linear decay at the end; 0: a fifth of the run")
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.1, description="last learning rate / peak")
    grad_clip: Annotated[float, Field(ge=0)] = Field(1.0, description="largest global gradient norm; 0: no clipping")
    losses: list[LossPart] = Field(
        [LossPart(kind="cross_entropy")],
        description="what is minimised, besides the loss of each decoder: the sum of these, each by its weight "
        "(docs/losses.md)",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="initial weights, data order and dropout")
    max_bad_steps: Annotated[int, Field(ge=1, le=10**12)] = Field(
        3, description="stop after this many skipped (non-finite) steps in a row"
    )
    eval_every: Steps = Field(0, description="steps between held-out evaluations; 0: never")
    eval_packs: Annotated[int, Field(ge=1, le=10**12)] = Field(
        16, description="packs of one evaluation, always the same ones: of each source by its weight, at least one"
    )
    early_stop: EarlyStop | None = Field(
        None, description="end the run once evaluations get no better: `{patience: 3}`; default: never"
    )

    @property
    def warmup(self) -> int:
        """Steps of warmup."""
        return math.ceil(self.warmup_ratio * self.steps) if self.warmup_ratio else self.warmup_steps

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        return check_name(value, SCHEDULES, "schedule")

    @model_serializer(mode="wrap")
    def _as_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What follows from another key is not written: a saved config would have both."""
        derived = {"steps": self.epochs, "global_batch": self.batch_tokens}
        values: dict[str, Any] = write(self)
        return {key: value for key, value in values.items() if derived.get(key) is None}

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, value: Any) -> Any:
        pairs = (("epochs", "steps"), ("warmup_ratio", "warmup_steps"))
        for key, other in pairs if isinstance(value, dict) else ():
            if value.get(key) and value.get(other) not in (None, 0):
                raise ValueError(f"train.{key} and train.{other} are both set; one follows from the other, so keep one")
        return value

    @model_validator(mode="after")
    def _known_losses(self) -> "Train":
        places: dict[str, int] = {}
        for i, loss in enumerate(self.losses):
            if loss.kind in LOSSES:
                check_options(loss.kind, LOSSES[loss.kind], loss.options, f"train.losses.{i}.options")
            if (other := places.setdefault(loss.label, i)) != i:
                raise ValueError(
                    f"train.losses.{i} ({loss.kind}) is called {loss.label!r}, as train.losses.{other} is; give one of "
                    "them another `name`"
                )
        kinds = [loss.kind for loss in self.losses]
        if "kto" in kinds and (others := [kind for kind in kinds if kind in PAIRWISE]):
            raise ValueError(
                f"train.losses has kto, which reads answers one by one, and {others[0]}, which reads them in pairs; "
                "leave one of them out"
            )
        return self


class Router(Section):
    bias_rate: Weight = Field(
        0.0, description="routers with a correction bias: how far a step moves it towards even load (no loss needed)"
    )


class ParameterGroup(Section):
    """Parameters that are treated otherwise than the rest; what is not given is as for the whole run."""

    match: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        description="glob pattern, or a list of them, over names of parameters: `model.layers.0.*`; the first group "
        "that matches a parameter decides"
    )
    freeze: bool = Field(False, description="do not train them")
    lr: Rate | None = Field(
        None, description="peak learning rate; default: that of their part of the model, or `train.lr`"
    )
    weight_decay: Decay | None = Field(
        None, description="for all of them, norms and biases too; default: `optimizer.weight_decay` and `no_decay`"
    )
    kind: Text | None = Field(None, description="their optimizer, as `optimizer.kind`; default: the run's")
    options: dict[str, Any] = Field({}, description="its arguments; with the run's own kind, added to the run's")

    @property
    def patterns(self) -> list[str]:
        return [self.match] if isinstance(self.match, str) else self.match

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str | None) -> str | None:
        return value and check_name(value, OPTIMIZERS, "optimizer")

    @model_validator(mode="after")
    def _frozen_or_trained(self) -> "ParameterGroup":
        if self.freeze and (self.lr or self.weight_decay or self.kind or self.options):
            raise ValueError("what is frozen has no lr, weight_decay, kind or options; leave them or `freeze` out")
        return self


class Ema(Section):
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.999, description="share of the average that is kept when the weights are added to it"
    )
    every: Annotated[int, Field(ge=1, le=10**12)] = Field(1, description="steps between updates of the average")


class Optimizer(Section):
    kind: Text = Field(
        "adamw",
        description="`adamw`, `muon` (hidden matrices by Muon, the rest by AdamW), `adafactor`, `adamw_8bit` (needs "
        "torchao), or `package.module:Class` of your own",
    )
    options: dict[str, Any] = Field(
        {}, description="its arguments: `betas`, `eps`, `momentum`, ...; docs/optimizers.md"
    )
    moments: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="precision of AdamW's two moments; bf16 halves them, and is rounded stochastically "
        "(docs/memory.md)",
    )
    weight_decay: Decay = Field(0.1, description="decoupled weight decay")
    no_decay: list[Literal["norm", "bias", "embedding"]] = Field(
        ["norm", "bias", "embedding"], description="parameters that weight decay leaves alone"
    )
    groups: list[ParameterGroup] = Field([], description="parameters, by name, that are treated otherwise")
    ema: Ema | None = Field(
        None,
        description="keep a moving average of the weights: `{decay: 0.999}`; written by the flag `--ema` of export",
    )

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        return check_name(value, OPTIMIZERS, "optimizer")

    @model_validator(mode="after")
    def _known_options(self) -> "Optimizer":
        check_optimizer_options(self.kind, self.options, "optimizer.options")
        kinds = {self.kind, *(group.kind for group in self.groups)}
        if self.moments == "bf16" and not kinds & {"adamw", "muon"}:
            raise ValueError(
                f"optimizer.moments: bf16 is for the kinds adamw and muon (for what it leaves to AdamW), and kind is "
                f"{self.kind}; leave it out"
            )
        for name in ("amsgrad", "fused"):
            if self.moments == "bf16" and name in self.options:
                raise ValueError(f"optimizer.options.{name}: cannot be had with optimizer.moments: bf16; leave it out")
        for i, group in enumerate(self.groups):
            check_optimizer_options(group.kind or self.kind, group.options, f"optimizer.groups.{i}.options")
        return self


class Checkpoint(Section):
    every: Steps = Field(0, description="steps between checkpoints; 0: only at the end of the run")
    keep: Annotated[int, Field(ge=1, le=10**12)] = Field(2, description="newest complete checkpoints to keep")
    dir: Text | None = Field(None, description="where checkpoints go; default: `<log.dir>/checkpoints`")
    resume: Text = Field(
        "auto",
        description="`auto`: the newest intact one in `dir`; `never`; a checkpoint folder; or `weights:PATH`: a new "
        "run from the weights of a checkpoint or of a run",
    )
    best: Text | None = Field(
        None,
        description="a metric of evaluations, `eval/loss`: save after each evaluation with the best one so far, and "
        "keep that checkpoint besides the newest `keep`",
    )
    on_save_error: Literal["stop", "continue"] = Field(
        "stop",
        description="a save fails (disk full ...): stop with an error, or warn and train on; older ones stay intact",
    )

    @model_validator(mode="after")
    def _weights_of_whom(self) -> "Checkpoint":
        if self.resume in ("", "weights", "weights:"):
            raise ValueError(
                f"checkpoint.resume is {self.resume!r}; expected auto, never, a checkpoint folder, or weights:PATH "
                "with the checkpoint or run folder that the weights are of"
            )
        return self


class MetricPart(Section):
    kind: str = Field(
        description="`accuracy` of the next token; `exact_match` of answers; or `package.module:function` of your own, "
        "of an `omnizoo.Answer` (docs/evaluation.md)"
    )
    options: dict[str, Any] = Field({}, description="further arguments of your function")
    name: Annotated[str, Field(min_length=1, max_length=80)] | None = Field(
        None, description="the metric is `eval/NAME`; default: its kind, or the name of your function"
    )
    higher_is_better: bool = Field(True, description="for `checkpoint.best` and `train.early_stop`")

    @property
    def label(self) -> str:
        return f"eval/{self.name or self.kind.rpartition(':')[2]}"

    @property
    def is_of_answers(self) -> bool:
        return self.kind != "accuracy"

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """A name alone is enough where there is nothing else to say."""
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        return check_name(value, METRICS, "metric")

    @model_validator(mode="after")
    def _plain_name(self) -> "MetricPart":
        if self.name is not None and not self.name.isidentifier():
            raise ValueError(f"{self.name!r} cannot be the name of a metric; use letters, digits and _")
        if self.options and self.kind in METRICS:
            raise ValueError(f"options are arguments of a function of your own; {self.kind} has none")
        return self


class Evaluation(Section):
    samples: Annotated[int, Field(ge=0, le=10**6)] = Field(
        0,
        description="held-out rows that are put to the model as questions at each evaluation; answers are in "
        "`samples.jsonl` and in the report (docs/evaluation.md)",
    )
    max_tokens: Annotated[int, Field(ge=1, le=2**20)] = Field(64, description="most tokens of an answer")
    temperature: Annotated[float, Field(ge=0, le=1000)] = Field(
        0.0, description="of what is drawn, from `train.seed`; 0: always the likeliest"
    )
    metrics: list[MetricPart] = Field(
        [],
        description="figures besides the losses: `accuracy`, `exact_match`, `package.module:function` of your own, or "
        "`{kind, options, name, higher_is_better}`",
    )

    @model_validator(mode="after")
    def _of_answers(self) -> "Evaluation":
        for i, metric in enumerate(self.metrics):
            if metric.is_of_answers and not self.samples:
                raise ValueError(
                    f"evaluation.metrics.{i} ({metric.kind}) is of answers, and evaluation.samples is 0: there are "
                    "none; set how many held-out rows are to be answered"
                )
            if metric.label == "eval/loss" or metric.label in [other.label for other in self.metrics[:i]]:
                raise ValueError(f"evaluation.metrics.{i}: {metric.label} is there already; give it another `name`")
        return self

    def higher_is_better(self, metric: str) -> bool:
        """Of any metric of evaluations; losses are better when they are lower."""
        return any(part.higher_is_better for part in self.metrics if part.label == metric)


class CallbackPart(Section):
    kind: str = Field(description="`package.module:Class` of your own, a subclass of `omnizoo.Callback`")
    options: dict[str, Any] = Field({}, description="arguments of the class")

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """A name alone is enough where there are no options."""
        kind = value.get("kind") if isinstance(value, dict) else value
        if isinstance(kind, str):
            check_own_name(kind, "a class; expected `package.module:Class`")
        return {"kind": value} if isinstance(value, str) else value


class Log(Section):
    dir: Text = Field("runs/default", description="the run folder: config, metrics, TensorBoard, checkpoints, report")
    every: Annotated[int, Field(ge=1, le=10**12)] = Field(
        1, description="steps between console lines where there is no terminal"
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    wandb: Text | None = Field(None, description="W&B project to log to (needs `pip install omnizoo[wandb]`)")
    callbacks: list[CallbackPart] = Field(
        [],
        description="code of your own at fixed moments of the run (docs/callbacks.md): `package.module:Class`, or with "
        "arguments `{kind, options}`",
    )


def fitting_lanes(global_batch: int) -> int:
    """Lanes for any number of ranks that shares out such a batch: a divisor of it, or a multiple where that is small.
    Of the config alone, since the order of the data must not depend on the world."""
    divisor = max(n for n in range(1, MOST_FITTING_LANES + 1) if global_batch % n == 0)
    return divisor * -(-FEWEST_LANES // divisor)


def _value_of(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, dict) else getattr(section, key, None)


def _packs_of(tokens: int, pack_tokens: Any) -> int:
    if type(pack_tokens) is not int or pack_tokens < 1:
        return 1  # which is a mistake of its own
    packs, rest = divmod(tokens, pack_tokens)
    if rest:
        near = " or ".join(f"{n * pack_tokens}" for n in (packs, packs + 1) if n)
        raise ValueError(
            f"train.batch_tokens is {tokens}, and a step has whole packs of data.pack_tokens {pack_tokens}; expected "
            f"{near}"
        )
    return packs


class Config(Section):
    model: Model = Field(description="what is trained: weights from `model.path`, or random ones from `model.config`")
    data: Data = Field(description="what it is trained on, and how rows become packs")
    parallel: Parallel = Field(
        default_factory=Parallel, description="how it is spread over processes; the numbers do not depend on it"
    )
    train: Train = Field(default_factory=Train, description="the loop: length, batch, learning rate, evaluation")
    evaluation: Evaluation = Field(
        default_factory=Evaluation, description="what is looked at on held-out data besides the loss"
    )
    optimizer: Optimizer = Field(
        default_factory=Optimizer, description="what updates the weights, and which of them how"
    )
    router: Router = Field(default_factory=Router, description="routers of a mixture of experts, besides their losses")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="saving and resuming")
    log: Log = Field(default_factory=Log, description="the run folder and what is written about the run")

    @property
    def preference_pairs(self) -> Literal["refused", "allowed", "required"]:
        """What becomes of rows with preferences, by the losses: one of them must read these, and if all do, there is
        nothing to learn from other rows."""
        kinds = {loss.kind for loss in self.train.losses}
        if kinds.isdisjoint(PREFERENCES):
            return "refused"
        produces = any(modality.decoder is not None for modality in self.model.modalities.values())
        return "allowed" if kinds - {*PREFERENCES, *OF_ROUTERS} or produces else "required"

    @property
    def learns_answers(self) -> bool:
        """Good answers of preferences are also learnt by losses of single tokens: what decoders produce, too."""
        return bool({loss.kind for loss in self.train.losses} - {*PREFERENCES, *OF_ROUTERS})

    @property
    def single_answers(self) -> bool:
        """Answers are judged one by one, each by its label, and not in pairs."""
        return any(loss.kind == "kto" for loss in self.train.losses)

    @property
    def known_answers(self) -> bool:
        """Answers are told apart by their content: a loss keeps on disk what it has once computed of them."""
        return any(loss.kind in PREFERENCES and loss.options.get("reference_cache") for loss in self.train.losses)

    def without_cache(self) -> "Config":
        """For trials with other weights: losses keep nothing on disk of what they compute of answers."""
        losses = [
            loss.model_copy(update={"options": {k: v for k, v in loss.options.items() if k != "reference_cache"}})
            if loss.kind in PREFERENCES
            else loss
            for loss in self.train.losses
        ]
        return self.model_copy(update={"train": self.train.model_copy(update={"losses": losses})})

    @property
    def mismatched_answers(self) -> bool:
        """Besides its own answer, each prompt needs that of another row: a loss compares with how likely it is."""
        return any(loss.kind == "kto" and loss.options.get("baseline") != "zero" for loss in self.train.losses)

    @model_validator(mode="before")
    @classmethod
    def _settled(cls, value: Any) -> Any:
        """What follows from other keys: packs of a step from `train.batch_tokens`, and lanes that fit them."""
        if not isinstance(value, dict):
            return value
        data, train = value.get("data"), value.get("train")
        tokens, batch = (_value_of(train, key) for key in ("batch_tokens", "global_batch"))
        if train is not None and type(tokens) is int and tokens > 0:
            if isinstance(train, dict) and batch is not None:
                raise ValueError(
                    "train.batch_tokens and train.global_batch are both set; one follows from the other, so keep one"
                )
            batch = _packs_of(tokens, _value_of(data, "pack_tokens") or Data.model_fields["pack_tokens"].default)
            changed = {"global_batch": batch}
            value = value | {"train": train | changed if isinstance(train, dict) else train.model_copy(update=changed)}
        if isinstance(data, dict) and "lanes" not in data:
            default = Train.model_fields["global_batch"].default
            value |= {"data": data | {"lanes": fitting_lanes(batch if type(batch) is int and batch > 0 else default)}}
        return value

    @model_validator(mode="after")
    def _one_name_each(self) -> "Config":
        for i, loss in enumerate(self.train.losses):
            if (modality := self.model.modalities.get(loss.label)) is not None and modality.decoder is not None:
                raise ValueError(
                    f"train.losses.{i} ({loss.kind}) is called {loss.label!r}, as the loss of that decoder is; give it "
                    "another `name`"
                )
        return self

    @model_validator(mode="after")
    def _reads_every_row(self) -> "Config":
        weights = [source.weight for source in self.data.sources]
        if self.train.epochs is not None and len(set(weights)) > 1:
            listed = ", ".join(f"{weight:g}" for weight in weights)
            raise ValueError(
                f"train.epochs reads every row equally often, but data.sources have the weights {listed}; leave the "
                "weights out, or set train.steps"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_on_something(self) -> "Config":
        if self.train.eval_every and not self.data.eval_sources:
            raise ValueError(
                f"train.eval_every is {self.train.eval_every}, but data.eval_sources is empty: there is nothing to "
                "evaluate on; name held-out data there, or set train.eval_every: 0"
            )
        if not self.train.eval_every:
            for key, is_set in (("checkpoint.best", self.checkpoint.best), ("train.early_stop", self.train.early_stop)):
                if is_set is not None:
                    raise ValueError(
                        f"{key} goes by evaluations, but train.eval_every is 0: there are none; set train.eval_every "
                        f"and data.eval_sources, or unset {key}"
                    )
        return self
