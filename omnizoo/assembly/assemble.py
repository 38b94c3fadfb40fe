"""What a run is made of before it has weights: tokenizer, model on meta, what the model reads, the loader of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from omnizoo.assembly.entrance import read_modalities
from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.config.section import Given
from omnizoo.data.fingerprint import content_of
from omnizoo.data.held_out import held_out_config
from omnizoo.data.loader import Loader, build_loader
from omnizoo.data.reader import Reader, build_reader
from omnizoo.data.rows import RowSource
from omnizoo.models.build import build_model, check_vocabulary, given_model, load_tokenizer, tensors_of
from omnizoo.models.hf_private import most_positions
from omnizoo.parallel.agree import rank_apart
from omnizoo.parallel.mesh import Mesh


@dataclass(frozen=True)
class Assembly:
    config: Config
    tokenizer: Any
    model: nn.Module  # on meta, until `parallelize` gives it weights

    @cached_property
    def media(self) -> dict[str, Any]:
        """What the model reads besides text. Ask for it, or for what reads rows, before the model is sharded."""
        return read_modalities(self.model, self.config.model) | {"most_positions": most_positions(self.model)}

    def reader(self, sources: Sequence[RowSource] | None = None) -> Reader:
        """Reads the rows of the config, or of other `sources`."""
        return build_reader(self.config, self.tokenizer, **self.media, sources=sources)

    def held_out(self) -> Reader | None:
        """Reads held-out rows; None if the run never evaluates."""
        config = held_out_config(self.config)
        return build_reader(config, self.tokenizer, **self.media) if config.train.eval_every else None

    def loader(self, mesh: Mesh) -> Loader:
        return build_loader(self.config, self.tokenizer, mesh.rank, mesh.layout.world, **self.media)


def check_same_model(config: Config, mesh: Mesh) -> None:
    """Refuse a model from Python that is not the same on all ranks: each rank has made its own. Weights may differ;
    those of the first rank count."""
    if not isinstance(config.model.given, Given):
        return
    given = given_model(config.model)
    tensors = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors_of(given)]
    if (rank := rank_apart(mesh, tensors)) is not None:
        raise UserError(f"model=: rank {rank} has a module with other parameters than rank 0; make the same on all")
    if nowhere := mesh.from_first([name for name, tensor in tensors_of(given) if tensor.is_meta]):
        raise UserError(f"model=: {nowhere[0]} is on meta; the first rank's module needs weights to begin with")


def check_same_rows(reader: Reader, mesh: Mesh) -> None:
    """Refuse rows from Python that are not the same on all ranks."""
    for spec, source in zip(reader.config.data.sources, reader.sources, strict=True):
        if mesh.layout.world > 1 and spec.path is None and (rank := rank_apart(mesh, content_of(source))) is not None:
            raise UserError(f"{spec.name}: rank {rank} has other rows than rank 0; make the same ones on every rank")


def assemble(config: Config) -> Assembly:
    """The parts of the run that `config` describes. One place for training, `verify` and `data inspect`."""
    tokenizer = load_tokenizer(config.model)
    model = build_model(config.model, config.parallel.precision)
    check_vocabulary(model, tokenizer)
    return Assembly(config, tokenizer, model)
