"""`model`: where it comes from, what it is composed of, and what an adapter adds to it."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from omnizoo.config.doors import check_own_name
from omnizoo.config.section import Object, Part, Rate, Section, Text, Weight


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
