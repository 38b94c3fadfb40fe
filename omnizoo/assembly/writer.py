"""A conversation in, the model's answer out: rows are read as in training, and the answer has the shape of a row's
content again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.entrance import keep_logits
from omnizoo.assembly.published import media_model
from omnizoo.checkpoint.stream import stream_own
from omnizoo.config.errors import UserError
from omnizoo.config.model_section import Model
from omnizoo.config.schema import Config
from omnizoo.data.render import HERE, Renderer
from omnizoo.data.rendered import Rendered
from omnizoo.data.rows import BadRow, Folder
from omnizoo.modalities.base import Modality, Sampling
from omnizoo.modalities.item import BadMedia
from omnizoo.models.build import MASTER_DTYPE, check_vocabulary, load_tokenizer, read_model_config, tensors_of
from omnizoo.models.generate import Piece, follow, generate
from omnizoo.models.hf_private import auto_class
from omnizoo.models.media_model import MediaModel
from omnizoo.models.weights import load_whole
from omnizoo.ops.device import is_host
from omnizoo.parallel.agree import agree
from omnizoo.parallel.mesh import Mesh
from omnizoo.parallel.shard import release

Told = Callable[[Piece], None]


@dataclass(frozen=True)
class Writer:
    """A trained model, whole, on one device, with what it takes to talk to it."""

    model: PreTrainedModel
    media: MediaModel
    tokenizer: Any
    renderer: Renderer
    modalities: Mapping[str, Modality]

    def write(
        self,
        messages: list[dict[str, Any]] | str,
        sampling: Sampling | None = None,
        max_tokens: int = 256,
        folder: Folder = HERE,
        told: Told | None = None,
        followed: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """The answer to `messages`; a string is one message of the user, or, without a chat template, a beginning.

        Paths of media in them are relative to `folder`. `told` gets each piece as it becomes longer. `followed`:
        options for what follows the text, such as `{"speaker": "ethan"}` of a model that speaks; None: nothing does.
        """
        try:
            prompt = self.renderer.prompt(messages, folder.find)
        except (BadRow, BadMedia) as reason:
            raise UserError(f"the prompt cannot be used: {reason}") from None
        return self.answer(prompt, sampling, max_tokens, told, followed)

    def answer(
        self,
        prompt: Rendered,
        sampling: Sampling | None = None,
        max_tokens: int = 256,
        told: Told | None = None,
        followed: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """What the model writes after `prompt`, as the renderer gives it; and what follows, see `write`."""
        try:
            items = [
                replace(item, inputs=item.port.module(self.modalities).prepare(item.media)) for item in prompt.items
            ]
        except BadMedia as reason:
            raise UserError(f"the prompt cannot be used: {reason}") from None
        if not len(prompt.ids):
            raise UserError("the prompt is empty: there is nothing to go on from")
        how = (max_tokens, sampling, self._end_of_turn(), told)
        ids = prompt.ids.tolist()
        pieces = generate(self.model, self.media, self.tokenizer, self.modalities, ids, items, *how)
        said = [token for piece in pieces for token in piece.ids]
        if followed is None or not said:
            return pieces
        drawn = sampling or Sampling()
        more = follow(self.model, self.media, self.modalities, [*ids, *said], items, followed, drawn)
        if told is not None:
            for piece in more:
                told(piece)
        return pieces + more

    def save(self, piece: Piece, stem: Path) -> str:
        """Write an item that was produced to a file; its name begins with `stem`."""
        modality = self.modalities[piece.modality]
        decoder = modality.decoder or modality.follower
        assert decoder is not None
        stem.parent.mkdir(parents=True, exist_ok=True)
        return decoder.save(piece.item, str(stem))

    def text(self, pieces: Sequence[Piece]) -> str:
        """What was written, without special tokens; items as their names in brackets."""
        return "".join(self.decode(piece) if piece.modality == "text" else f"[{piece.modality}]" for piece in pieces)

    def decode(self, piece: Piece) -> str:
        """A piece of text as a reader wants it: special tokens are for the model."""
        return str(self.tokenizer.decode(piece.ids, skip_special_tokens=True))

    def _end_of_turn(self) -> list[int]:
        """Tokens that end an answer: the model's own, and the one the chat template puts there."""
        declared = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ends = declared if isinstance(declared, list) else [declared] if declared is not None else []
        return [*ends, *self.renderer.end_of_turn()]


def load_writer(
    folder: str | Path,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    allow_code: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Writer:
    """The model of a Hugging Face folder (as `omnizoo export` writes it), ready to write.

    `allow_code`: modules that the folder may name as encoders and decoders; `trust_remote_code`: run code inside of it.
    """
    spec = Model(path=str(folder), allow_code=list(allow_code), trust_remote_code=trust_remote_code)
    model = load_whole(spec, dtype)
    nn.Module.to(model, device or torch.device("cpu"))
    return writer_of(model, spec, load_tokenizer(spec))


def writer_of(model: PreTrainedModel, spec: Model, tokenizer: Any) -> Writer:
    """For a model of transformers' own making that has its weights, whole."""
    check_vocabulary(model, tokenizer)
    media = media_model(model)
    modalities = media.modalities(spec)
    media.attach(spec)
    keep_logits(model)
    renderer = Renderer(tokenizer, False, modalities, ignore=["*"], turns=media.turns)
    return Writer(model.eval(), media, tokenizer, renderer, modalities)


def whole_copy(model: nn.Module, config: Config, mesh: Mesh) -> PreTrainedModel | None:
    """A copy of a sharded model as it is now, an adapter merged in, whole on the device of the first rank and ready for
    a cache; None elsewhere. All ranks must call."""
    copy = agree(mesh, lambda: _empty_copy(config, mesh.device) if mesh.is_first else None)
    release(model)  # else some weights would be in the precision of the last forward pass
    targets = {} if copy is None else dict(tensors_of(copy))
    with torch.no_grad():
        for name, weight in stream_own(model, mesh.is_first):
            targets.pop(name).copy_(weight)
    if copy is not None:
        assert not targets.keys() & copy.state_dict().keys(), f"weights without a value: {sorted(targets)[:3]}"
        if (settings := getattr(model, "generation_config", None)) is not None:
            copy.generation_config = settings
    return copy


def _empty_copy(config: Config, device: torch.device) -> PreTrainedModel:
    """As `load_whole` would build it; what its constructor draws is not kept, nor does it move the run's generators."""
    read = read_model_config(config.model)
    builder = auto_class(read, config.model.trust_remote_code)
    assert builder is not None
    with torch.random.fork_rng(devices=[] if is_host(device) else [device]), device:
        copy = builder.from_config(
            read, dtype=MASTER_DTYPE[config.parallel.precision], trust_remote_code=config.model.trust_remote_code
        )
    assert isinstance(copy, PreTrainedModel)
    return nn.Module.to(copy, MASTER_DTYPE[config.parallel.precision])
