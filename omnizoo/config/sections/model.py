"""Keys of `model`: where the weights come from, encoders and decoders, frozen weights, adapter."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from omnizoo.config.plugins import plugin
from omnizoo.config.sections.base import (
    ConfigSection,
    LearningRate,
    LossWeight,
    NamedSettings,
    Object,
    SubmoduleSettings,
    Text,
    alternatives,
)


class EncoderSettings(SubmoduleSettings):
    """Settings of an encoder."""

    kind: Text | None = None
    """Built-in name (docs/reference/components.md), or `package.module:Class` of a plugin. A composed model requires
    it. Leave it unset for a multimodal Hugging Face model: such a model has its own encoders and decoders."""

    options: dict[str, Any] = Field({})
    """Keyword arguments of the encoder or decoder class, such as `max_pixels` (docs/reference/components.md)."""


class DecoderSettings(EncoderSettings):
    """Settings of a decoder."""

    weight: LossWeight = 1.0
    """Factor of the decoder's loss in the total loss."""


class ProjectorSettings(NamedSettings):
    """Settings of a projector. A projector maps encoder features to the width of the foundation."""

    kind: Literal["linear", "mlp", "pixel_shuffle", "resampler", "none"] = "mlp"
    """Architecture of the projector (docs/reference/components.md). `pixel_shuffle` and `resampler` also reduce the
    number of placeholder tokens. Use `none` if the features already have the width of the foundation."""

    options: dict[str, Any] = Field({})
    """Keyword arguments of the projector: `factor` for `pixel_shuffle`, `rows` for `resampler`."""

    freeze: bool = False
    """Whether the weights of the projector stay fixed. By default, they are trained."""

    lr: LearningRate | None = None
    """Peak learning rate of the projector. Default: `train.lr`."""

    @model_validator(mode="after")
    def _check_kind(self) -> "ProjectorSettings":
        """Check that `kind` is not in `options`, and that a projector without weights has no settings for training."""
        if "kind" in self.options:
            raise ValueError("kind is in options. Set it next to options instead.")
        if self.kind == "none" and (self.freeze or self.lr is not None):
            raise ValueError("freeze and lr have no effect with kind none, which has no weights. Remove them.")
        return self


class MarkSettings(ConfigSection):
    """Special tokens of a modality. In the defaults, `NAME` is the name of the modality."""

    begin: Text | None = None
    """Token before each media item. It is added to the vocabulary if it is new. Default: `<|NAME_begin|>`."""

    placeholder: Text | None = None
    """Placeholder token. It is repeated at the positions of a media item. It is added to the vocabulary if it is new.
    Default: `<|NAME_pad|>`."""

    end: Text | None = None
    """Token after each media item. It is added to the vocabulary if it is new. Default: `<|NAME_end|>`."""


class ModalitySettings(ConfigSection):
    """Settings of one modality of a composed or multimodal model."""

    encoder: EncoderSettings | None = None
    """Encoder of the modality. Set it if the model receives such media. Default: no encoder."""

    projector: ProjectorSettings | None = None
    """Projector between a built-in encoder and the foundation. Default: `mlp`."""

    decoder: DecoderSettings | None = None
    """Decoder of the modality. Set it if the model generates such media. Default: no decoder."""

    marks: MarkSettings = MarkSettings()
    """Special tokens of the modality. Set them if the tokenizer already has suitable tokens."""


REGEX = "re:"  # beginning of an entry that is a regular expression


class AdapterSettings(ConfigSection):
    """Settings of a LoRA adapter."""

    # `path` replaces the other keys, because the adapter folder determines their values. The other keys do not replace
    # `path`: otherwise an override such as `--model.adapter.rank 8` would silently start a new adapter.
    exclusive: ClassVar[dict[str, tuple[str, ...]]] = {
        "path": (
            *("kind", "rank", "alpha", "rank_pattern", "alpha_pattern", "targets", "exclude", "experts", "bias"),
            *("modules_to_save", "init"),
        )
    }

    kind: Literal["lora", "dora", "rslora"] = "lora"
    """Kind of adapter. `lora` is plain LoRA. `dora` also trains the norm of each weight row. `rslora` scales the output
    by alpha / sqrt(rank) instead of alpha / rank; it suits high ranks."""

    rank: Annotated[int, Field(ge=1, le=2**16)] = 16
    """Rank of the adapter matrices. A higher rank gives the adapter more capacity and needs more memory."""

    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """Numerator of the adapter's scale: the output of the adapter is multiplied by alpha / rank."""

    rank_pattern: dict[Text, Annotated[int, Field(ge=1, le=2**16)]] = Field({})
    """Ranks of some targets, instead of `rank`, by entries of the form of those in `targets`. If several entries match
    a target, the first one applies."""

    alpha_pattern: dict[Text, Annotated[float, Field(gt=0, le=1e6)]] = Field({})
    """Values of `alpha` for some targets, in the same form as `rank_pattern`."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability for the adapter's input during training."""

    targets: Annotated[list[Text], Field(min_length=1)] = Field(["all-linear"])
    """Modules that get adapter matrices. `all-linear` selects the linear layers in the blocks of the language model.
    Other entries are ends of module names, such as `q_proj` or `experts.down_proj`, or match full names: glob patterns,
    and regular expressions that begin with `re:` (docs/how-to/adapters.md)."""

    experts: Literal["separate", "shared"] = "separate"
    """Adapter matrices of fused experts: `separate` ones for each expert, or a pair that is `shared` by all experts of
    a layer."""

    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases that are trained: `none`, those of `all` modules, or `lora_only` those of modules with adapter
    matrices."""

    exclude: list[Text] = Field([])
    """Modules that match `targets` but get no adapter matrices. Entries have the same form as in `targets`."""

    modules_to_save: list[Text] = Field([])
    """Modules whose weights are trained in full and saved with the adapter. Entries have the same form as in
    `targets`."""

    init: Literal["kaiming", "gaussian", "random"] = "kaiming"
    """Initialization of the first adapter matrix. With `kaiming` and `gaussian`, the second matrix is zero, so training
    starts from the unchanged base model. `random` initializes both matrices randomly."""

    base: Literal["nf4", "int8"] | None = None
    """Quantization of the frozen linear layers and experts of the language model, to save memory: `nf4` uses 4 bits (as
    in QLoRA), `int8` uses 8 bits. Default: no quantization."""

    path: Text | None = None
    """Existing PEFT adapter to continue from: a folder, or `ORG/NAME` on the hub. It determines all other keys except
    `dropout` and `base`. Default: a new adapter."""

    @model_validator(mode="after")
    def _check_patterns(self) -> "AdapterSettings":
        """Check that all regular expressions are valid."""
        for key in ("targets", "exclude", "modules_to_save", "rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, key):
                try:
                    re.compile(pattern.removeprefix(REGEX) if pattern.startswith(REGEX) else "")
                except re.error as error:
                    raise ValueError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_path(self) -> "AdapterSettings":
        """Check that `path` is not combined with keys whose values the adapter folder determines."""
        fields = type(self).model_fields
        changed = [name for name in self.exclusive["path"] if getattr(self, name) != fields[name].default]
        if self.path is not None and changed:
            raise ValueError(f"path: the adapter folder determines {changed[0]}. Remove {', '.join(changed)}.")
        return self


class ScoreHead(ConfigSection):
    """Head of a sequence classification model. It scores the last token of each sample."""

    labels: Annotated[list[Text], Field(min_length=1)]
    """Names of the scores, in the order of the rows of the head."""

    problem: Literal["reward", "single", "multi"]
    """Meaning of the scores: a single reward, logits of labels that exclude each other, or logits of independent
    labels."""


class ModelSection(ConfigSection):
    """Keys of `model`."""

    exclusive: ClassVar[dict[str, tuple[str, ...]]] = alternatives(
        ("path",), ("config", "module"), ("foundation",), ("given",)
    )

    path: Text | None = None
    """Pretrained model: a Hugging Face model folder with config, safetensors weights and tokenizer, a pipeline folder
    of diffusers, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hugging Face Hub (docs/how-to/hub.md)."""

    config: Text | dict[str, Any] | None = None
    """Model config to initialize randomly from `train.seed`, instead of `path`: a Hugging Face model folder, `ORG/NAME`
    on the hub, a mapping with `model_type`, or, for a diffusion transformer, a mapping with `_class_name`. With
    `model.module`, a mapping of its arguments."""

    pipeline: Text | None = None
    """Pipeline folder of diffusers with the scheduler, autoencoder and text encoders of a diffusion transformer. Set it
    if `path` or `config` contains only the transformer. Default: the folder of `path` or `config`."""

    init_from: Text | None = None
    """Checkpoint or run folder with the initial weights of a new run. The run starts at step 0 with a new optimizer. If
    the run has a checkpoint to resume from, `init_from` is not used (docs/explanation/checkpoints.md)."""

    module: Text | None = None
    """`package.module:callable` of a plugin that returns a torch module. It is called with the arguments in
    `model.config`."""

    given: Object = None
    """Class of the model object that was passed to `omnizoo.train(model=...)`. It is set automatically."""

    recipe: Annotated[Text, plugin("a recipe; expected `package.module:RECIPE`")] | None = None
    """`package.module:RECIPE` of a plugin: an `omnizoo.Recipe` object that describes a model family
    (docs/how-to/plugins.md). Default: the built-in recipe of the family."""

    foundation: SubmoduleSettings | None = None
    """Causal language model of a composed model, instead of `path` and `config`. `modalities` adds encoders and
    decoders to it."""

    modalities: dict[str, ModalitySettings] = Field({})
    """Encoders and decoders by modality, such as `image`. A composed model consists of them and the foundation. For a
    multimodal Hugging Face model, the entries change the settings of its own encoders and decoders."""

    part: Text | None = None
    """Submodel to train, as its key in config.json, for Hugging Face models with several submodels, or the transformer
    to train (`transformer` or `transformer_2`) of a pipeline with two. Default: the whole model."""

    freeze: list[Text] = Field([])
    """Modules and parameters that are not trained: names or ends of names (`embed_tokens`), or glob patterns for full
    names (`model.layers.[0-3].*`)."""

    tokenizer: Object = None
    """Hugging Face tokenizer: a folder, or `ORG/NAME` on the hub. Default: the tokenizer of the model."""

    resize_vocabulary: bool | None = None
    """Whether to add rows for new tokens to the embedding and the head (docs/explanation/checkpoints.md). The rows are
    initialized from `train.seed`. By default, rows are added only for the marks of a composed model."""

    attention: Text = "auto"
    """Attention kernel. `auto` selects the fastest exact kernel for packs on the device. Other values are names of
    transformers implementations."""

    text_only: bool = False
    """Whether to train a multimodal model that has no recipe on text only. By default, such a model is an error."""

    trust_remote_code: bool = False
    """Whether to run Python code from the model folder. By default, a model that needs such code is an error."""

    allow_code: list[Text] = Field([])
    """Python modules from which a saved composed model may import its encoders and decoders; their submodules are
    included. Plugins that the config itself names are always allowed."""

    allow_missing: list[Text] = Field([])
    """Glob patterns for weights that `model.path` may lack. They are initialized from `train.seed`. By default, a
    missing weight is an error."""

    allow_unexpected: list[Text] = Field([])
    """Glob patterns for weights in `model.path` that the model does not have. They are ignored. By default, such a
    weight is an error."""

    score_head: ScoreHead | None = None
    """Head that replaces the language model head. It is set automatically by the losses `reward` and `classification`
    (docs/how-to/classification.md)."""

    adapter: AdapterSettings | None = None
    """LoRA adapter to train instead of the model's weights (docs/how-to/adapters.md). By default, all weights are
    trained."""

    @model_validator(mode="after")
    def _check_sources(self) -> "ModelSection":
        """Check that the model has exactly one source, and that the other keys can be combined with it."""
        sources = (self.path, self.config, self.foundation, self.given)
        num_sources = sum(source is not None for source in sources)
        if num_sources != 1:
            raise ValueError(
                f"model: {num_sources} sources of the model are set. Set exactly one of model.path (pretrained "
                "weights), model.config (random initialization) and model.foundation (composed model)."
            )
        if self.foundation is not None:
            self._check_composed(self.foundation)
        if self.given is not None and (self.module is not None or self.part is not None):
            raise ValueError("model.given: model.module and model.part do not apply to a model object. Remove them.")
        if self.resize_vocabulary and (self.given is not None or self.module is not None):
            raise ValueError(
                "model.resize_vocabulary: not supported for a model object or model.module. Resize the vocabulary when "
                "you build the model, and remove the key."
            )
        if self.module is not None:
            if not isinstance(self.config, dict) or ":" not in self.module:
                raise ValueError(
                    f"model.module: {self.module!r}; expected the form `package.module:callable`, with its arguments "
                    "as a mapping in model.config."
                )
        elif isinstance(self.config, dict) and not {"model_type", "_class_name"} & self.config.keys():
            raise ValueError(
                "model.config: no `model_type`. Add one, such as `model_type: qwen3`, or `_class_name` for a diffusion "
                "transformer."
            )
        return self

    def _check_composed(self, foundation: SubmoduleSettings) -> None:
        """Check that the foundation has one source of weights, and that all encoders and decoders have a kind."""
        if (foundation.path is None) == (foundation.config is None):
            raise ValueError(
                "model.foundation: set one of path (pretrained weights) and config (random initialization)."
            )
        if self.module is not None:
            raise ValueError("model.module: not supported together with model.foundation. Remove one of them.")
        for name, modality in self.modalities.items():
            # A modality must not have the name of a field of rows, because media columns are named after modalities.
            if not name.isidentifier() or name in ("text", "tool", "message", "conversation"):
                raise ValueError(f"model.modalities.{name}: not a valid name. Use letters, digits and _.")
            if modality.encoder is None and modality.decoder is None:
                raise ValueError(f"model.modalities.{name}: set an encoder, a decoder, or both.")
            for role, module in (("encoder", modality.encoder), ("decoder", modality.decoder)):
                if module is not None and module.kind is None:
                    raise ValueError(
                        f"model.modalities.{name}.{role}: kind is missing. Set a built-in name or "
                        "`package.module:Class`."
                    )
