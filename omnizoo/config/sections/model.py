"""Keys of `model`: source of the weights, submodules, adapter."""

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
    """built-in name, or `package.module:Class` of a plugin; default: the encoder or decoder of a multimodal HF model"""

    options: dict[str, Any] = Field({})
    """arguments of the class: sizes, limits such as `max_pixels`, ..."""


class DecoderSettings(EncoderSettings):
    """Settings of a decoder."""

    weight: LossWeight = 1.0
    """weight of the decoder's loss"""


class ProjectorSettings(NamedSettings):
    """Settings of a projector."""

    kind: Literal["linear", "mlp", "pixel_shuffle", "resampler", "none"] = "mlp"
    """module that maps encoder features to the width of the foundation; `none` if they have that width"""

    options: dict[str, Any] = Field({})
    """arguments of the module: `factor` of pixel_shuffle, `rows` of resampler"""

    freeze: bool = False
    """whether the weights of the projector stay fixed; default: trained"""

    lr: LearningRate | None = None
    """peak learning rate; default: `train.lr`"""

    @model_validator(mode="after")
    def _check_kind(self) -> "ProjectorSettings":
        if "kind" in self.options:
            raise ValueError("kind is in options. Move it out of options, to the same level.")
        if self.kind == "none" and (self.freeze or self.lr is not None):
            raise ValueError("freeze and lr have no effect with kind none, which has no weights. Remove them.")
        return self


class MarkSettings(ConfigSection):
    """Special tokens of a modality. `NAME` is the name of the modality."""

    begin: Text | None = None
    """token before a media item; default: `<|NAME_begin|>`, added if it is new"""

    placeholder: Text | None = None
    """placeholder token of a media item; default: `<|NAME_pad|>`"""

    end: Text | None = None
    """token after a media item; default: `<|NAME_end|>`"""


class ModalitySettings(ConfigSection):
    """Settings of one modality of a composed or multimodal model."""

    encoder: EncoderSettings | None = None
    """encoder for media items of the modality as input; default: none"""

    projector: ProjectorSettings | None = None
    """projector between a built-in encoder and the foundation; default: `mlp`"""

    decoder: DecoderSettings | None = None
    """decoder for media items of the modality as output; default: none"""

    marks: MarkSettings = MarkSettings()
    """special tokens around media items, and their placeholder token"""


class AdapterSettings(ConfigSection):
    """Settings of a LoRA adapter."""

    # The folder determines the other keys. They do not replace the folder, because the run would lose its start.
    exclusive: ClassVar[dict[str, tuple[str, ...]]] = {
        "path": ("kind", "rank", "alpha", "targets", "exclude", "modules_to_save", "init")
    }

    kind: Literal["lora", "dora", "rslora"] = "lora"
    """kind of adapter: `lora`; `dora`, which also trains the norm of each weight row; `rslora`, which scales by alpha /
    sqrt(rank)"""

    rank: Annotated[int, Field(ge=1, le=2**16)] = 16
    """rank of the adapter matrices"""

    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """numerator of the scale of the adapter's output, alpha / rank"""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """dropout probability of the adapter's input in training"""

    targets: Annotated[list[Text], Field(min_length=1)] = Field(["all-linear"])
    """modules with adapter matrices: `all-linear` (linear layers of the language model's blocks), ends of names such as
    `q_proj` or `experts.down_proj`, or glob patterns over full names (docs/how-to/adapters.md)"""

    exclude: list[Text] = Field([])
    """modules of `targets` without adapter matrices, as names or patterns like those in `targets`"""

    modules_to_save: list[Text] = Field([])
    """modules that are trained in full, as names or patterns like those in `targets`"""

    init: Literal["kaiming", "gaussian", "random"] = "kaiming"
    """initialization of the first adapter matrix; the second matrix is zero, so that training starts at the base model,
    except with `random`, which initializes both"""

    base: Literal["nf4", "int8"] | None = None
    """quantization of the frozen linear layers and experts of the language model to 4 bits (`nf4`, as QLoRA) or 8 bits
    (`int8`); default: none"""

    path: Text | None = None
    """folder of a PEFT adapter to start from, or `ORG/NAME` on the hub; the adapter determines all other keys except
    `dropout` and `base`; default: a new adapter"""

    @model_validator(mode="after")
    def _check_path(self) -> "AdapterSettings":
        fields = type(self).model_fields
        changed = [name for name in self.exclusive["path"] if getattr(self, name) != fields[name].default]
        if self.path is not None and changed:
            raise ValueError(f"path: the adapter folder determines {changed[0]}. Remove {', '.join(changed)}.")
        return self


class ModelSection(ConfigSection):
    """Keys of `model`."""

    exclusive: ClassVar[dict[str, tuple[str, ...]]] = alternatives(
        ("path",), ("config", "module"), ("foundation",), ("given",)
    )

    path: Text | None = None
    """HF folder with config, safetensors weights and tokenizer, or `ORG/NAME` or `ORG/NAME@REVISION` on the Hugging
    Face Hub (docs/how-to/hub.md)"""

    config: Text | dict[str, Any] | None = None
    """HF folder or `ORG/NAME` on the hub, or inline mapping with `model_type`, for random initialization from
    `train.seed`"""

    init_from: Text | None = None
    """checkpoint or run folder with the initial weights of a new run, which starts at step 0 with a new optimizer; a
    checkpoint to resume from takes precedence (docs/explanation/checkpoints.md)"""

    module: Text | None = None
    """`package.module:callable` of a plugin that builds a torch module from the arguments in `model.config`"""

    given: Object = None
    """class of the model object that was passed to `omnizoo.train(model=...)`; set automatically"""

    recipe: Annotated[Text, plugin("a recipe; expected `package.module:RECIPE`")] | None = None
    """`package.module:RECIPE` of a plugin, an `omnizoo.Recipe` for the model family (docs/how-to/plugins.md); default:
    the built-in recipe"""

    foundation: SubmoduleSettings | None = None
    """causal language model of a composed model, instead of `path` and `config`"""

    modalities: dict[str, ModalitySettings] = Field({})
    """encoders and decoders of a composed model, by content type; or options of the encoders and decoders of a
    multimodal HF model"""

    part: Text | None = None
    """key in config.json of the submodel to train, for HF models with several submodels; default: the whole model"""

    freeze: list[Text] = Field([])
    """weights that are not trained: names or ends of names of modules and parameters (`embed_tokens`), or glob patterns
    over full names (`model.layers.[0-3].*`)"""

    tokenizer: Object = None
    """folder of the HF tokenizer, or `ORG/NAME` on the hub; default: that of the model"""

    resize_vocabulary: bool | None = None
    """whether to add rows for new tokens, initialized from `train.seed`, to embedding and head
    (docs/explanation/checkpoints.md); default: only for the marks of a composed model"""

    attention: Text = "auto"
    """attention kernel: `auto` for the fastest exact packed kernel of the device, or the name of a transformers
    implementation"""

    text_only: bool = False
    """whether to train a multimodal model without a recipe on text only; default: an error"""

    trust_remote_code: bool = False
    """whether to run Python code in the model folder; default: an error"""

    allow_code: list[Text] = Field([])
    """Python modules, with submodules, from which the folder of a composed model may import encoders and decoders;
    plugins in the config are always allowed"""

    allow_missing: list[Text] = Field([])
    """glob patterns of weights to initialize from `train.seed` if `model.path` does not contain them"""

    allow_unexpected: list[Text] = Field([])
    """glob patterns of weights in `model.path` to ignore"""

    adapter: AdapterSettings | None = None
    """LoRA adapter to train instead of the weights (docs/how-to/adapters.md); default: all weights are trained"""

    @model_validator(mode="after")
    def _check_sources(self) -> "ModelSection":
        possible = (self.path, self.config, self.foundation, self.given)
        origins = [origin for origin in possible if origin is not None]
        if len(origins) != 1:
            raise ValueError(
                f"model: {len(origins)} sources of the model are set. Set exactly one of model.path (pretrained "
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
                    f"model.module: {self.module!r} needs the form `package.module:callable`, with its arguments as a "
                    "mapping in model.config."
                )
        elif isinstance(self.config, dict) and "model_type" not in self.config:
            raise ValueError("model.config: no `model_type`. Add one, such as `model_type: qwen3`.")
        return self

    def _check_composed(self, foundation: SubmoduleSettings) -> None:
        """Check the keys of a composed model."""
        if (foundation.path is None) == (foundation.config is None):
            raise ValueError(
                "model.foundation: set one of path (pretrained weights) and config (random initialization)."
            )
        if self.module is not None:
            raise ValueError("model.module: not supported together with model.foundation. Remove one of them.")
        for name, modality in self.modalities.items():
            if not name.isidentifier() or name in ("text", "tool", "message", "conversation"):  # fields of rows
                raise ValueError(f"model.modalities.{name}: not a valid name. Use letters, digits and _.")
            if modality.encoder is None and modality.decoder is None:
                raise ValueError(f"model.modalities.{name}: set an encoder, a decoder, or both.")
            for role, module in (("encoder", modality.encoder), ("decoder", modality.decoder)):
                if module is not None and module.kind is None:
                    raise ValueError(
                        f"model.modalities.{name}.{role}: kind is missing. Set a built-in name or "
                        "`package.module:Class`."
                    )
