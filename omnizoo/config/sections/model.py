"""Keys of `model`: source of the weights, submodules, adapter."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from omnizoo.config.plugins import plugin
from omnizoo.config.sections.base import ConfigSection, LearningRate, LossWeight, Object, SubmoduleSettings, Text


class EncoderSettings(SubmoduleSettings):
    kind: Text | None = None
    """built-in name, or your own `package.module:Class`; not set for multimodal HF models, which have their own"""

    options: dict[str, Any] = Field({})
    """arguments of the class: sizes, limits such as `max_pixels`, ..."""


class DecoderSettings(EncoderSettings):
    weight: LossWeight = 1.0
    """weight of the decoder's loss"""


class ProjectorSettings(ConfigSection):
    kind: Literal["linear", "mlp", "pixel_shuffle", "resampler"] = "mlp"
    """module that maps encoder features to the width of the foundation"""

    options: dict[str, Any] = Field({})
    """arguments of the module: `factor` of pixel_shuffle, `rows` of resampler"""

    freeze: bool = False
    """do not train the projector"""

    lr: LearningRate | None = None
    """peak learning rate; default: `train.lr`"""

    @model_validator(mode="after")
    def _check_kind(self) -> "ProjectorSettings":
        if "kind" in self.options:
            raise ValueError("kind is not an option; set it next to options")
        return self


class MarkSettings(ConfigSection):
    begin: Text | None = None
    """token before a media item; default: `<|NAME_begin|>`, added if it is new"""

    placeholder: Text | None = None
    """placeholder token of a media item; default: `<|NAME_pad|>`"""

    end: Text | None = None
    """token after a media item; default: `<|NAME_end|>`"""


class ModalitySettings(ConfigSection):
    encoder: EncoderSettings | None = None
    """encoder: media items of this modality as input"""

    projector: ProjectorSettings | None = None
    """projector between a built-in encoder and the foundation"""

    decoder: DecoderSettings | None = None
    """decoder: media items of this modality as output"""

    marks: MarkSettings = MarkSettings()
    """special tokens around media items, and their placeholder token"""


class AdapterSettings(ConfigSection):
    kind: Literal["lora", "dora", "rslora"] = "lora"
    """`dora` also trains the norm of each row; `rslora` scales by alpha / sqrt(rank)"""

    rank: Annotated[int, Field(ge=1, le=2**16)] = 16
    """rank of the adapter matrices"""

    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """the adapter's output is scaled by alpha / rank"""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """dropout of the adapter's input in training"""

    targets: Annotated[list[Text], Field(min_length=1)] = Field(["all-linear"])
    """modules with adapter matrices: `all-linear` (linear layers of the language model's blocks), ends of names such as
    `q_proj` or `experts.down_proj`, or glob patterns over full names (docs/adapters.md)"""

    exclude: list[Text] = Field([])
    """modules of `targets` without adapter matrices, named in the same way"""

    modules_to_save: list[Text] = Field([])
    """modules that are fully trained, named in the same way"""

    init: Literal["kaiming", "gaussian", "random"] = "kaiming"
    """initialization of the first matrix; the second one is zero, so that training starts at the base model (`random`:
    initialized as well)"""

    base: Literal["nf4", "int8"] | None = None
    """quantize the frozen linear layers and experts of the language model to 4 (`nf4`, as QLoRA) or 8 bits; default:
    not quantized"""

    path: Text | None = None
    """folder of a PEFT adapter to start from; its files set all keys but `dropout` and `base`"""

    @model_validator(mode="after")
    def _check_path(self) -> "AdapterSettings":
        fields = type(self).model_fields
        others = [name for name in fields if name not in ("path", "dropout", "base")]
        changed = [name for name in others if getattr(self, name) != fields[name].default]
        if self.path is not None and changed:
            raise ValueError(f"path has an adapter with a {changed[0]} of its own; leave out {', '.join(changed)}")
        return self


class ModelSection(ConfigSection):
    path: Text | None = None
    """HF folder with config, safetensors weights and tokenizer"""

    config: Text | dict[str, Any] | None = None
    """HF folder or inline mapping (with `model_type`); weights are initialized from `train.seed`"""

    init_from: Text | None = None
    """checkpoint or run folder whose weights a new run starts from, at step 0 with a new optimizer; a checkpoint that
    the run resumes from takes precedence (docs/checkpoints.md)"""

    module: Text | None = None
    """your own `package.module:callable` that builds a torch module; `model.config` are its arguments"""

    given: Object = None
    """set by `omnizoo.train(model=...)`: the class of the model object; not set by hand"""

    recipe: Annotated[Text, plugin("a recipe; expected `package.module:RECIPE`")] | None = None
    """your own `package.module:RECIPE`: an `omnizoo.Recipe` for the model family, instead of the built-in one
    (docs/extending.md)"""

    foundation: SubmoduleSettings | None = None
    """instead of path and config: the causal language model of a composed model"""

    modalities: dict[str, ModalitySettings] = Field({})
    """encoders and decoders of a composed model, by content type; or options of those that a multimodal HF model has"""

    part: Text | None = None
    """submodel to train of an HF model that has several: its key in config.json"""

    freeze: list[Text] = Field([])
    """weights that are not trained: names or ends of names of modules and parameters (`embed_tokens`), or glob patterns
    over full names (`model.layers.[0-3].*`)"""

    tokenizer: Object = None
    """folder of the HF tokenizer; default: the model folder"""

    resize_vocabulary: bool | None = None
    """add rows for new tokens to embedding and head; existing rows stay, new ones are initialized from `train.seed`
    (docs/checkpoints.md); default: only for the marks of a composed model"""

    attention: Text = "auto"
    """`auto`: the fastest exact packed kernel for the device; or a transformers implementation by name"""

    text_only: bool = False
    """train a multimodal model that has no recipe on text only, instead of an error"""

    trust_remote_code: bool = False
    """run Python code that the model folder contains"""

    allow_code: list[Text] = Field([])
    """Python modules (and their submodules) that the folder of a composed model may name as encoders and decoders; code
    that this config names is always allowed"""

    allow_missing: list[Text] = Field([])
    """glob patterns of weights that may be missing in `model.path`; they are initialized from `train.seed`"""

    allow_unexpected: list[Text] = Field([])
    """glob patterns of weights in `model.path` to ignore"""

    adapter: AdapterSettings | None = None
    """train small adapter matrices and keep the weights frozen (docs/adapters.md)"""

    @model_validator(mode="after")
    def _check_sources(self) -> "ModelSection":
        possible = (self.path, self.config, self.foundation, self.given)
        origins = [origin for origin in possible if origin is not None]
        if len(origins) != 1:
            raise ValueError(
                "give exactly one of model.path (weights), model.config (random init) and model.foundation (composed)"
            )
        if self.foundation is not None:
            self._check_composed(self.foundation)
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

    def _check_composed(self, foundation: SubmoduleSettings) -> None:
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
