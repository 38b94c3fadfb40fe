"""What a run is made of before it has weights: tokenizer, model on meta, what the model reads, the loader of rows."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from omnizoo.assembly.entrance import read_modalities
from omnizoo.config.schema import Config
from omnizoo.data.loader import FlatPack, Loader, Reader, build_loader, build_reader, read_held_out
from omnizoo.models.build import build_model, check_vocabulary, load_tokenizer
from omnizoo.parallel.mesh import Mesh


@dataclass(frozen=True)
class Assembly:
    config: Config
    tokenizer: Any
    model: nn.Module  # on meta, until `parallelize` gives it weights

    @cached_property
    def media(self) -> dict[str, Any]:
        """What the model reads besides text. Ask for it, or for what reads rows, before the model is sharded."""
        return read_modalities(self.model, self.config.model)

    def reader(self) -> Reader:
        return build_reader(self.config, self.tokenizer, **self.media)

    def loader(self, mesh: Mesh) -> Loader:
        return build_loader(self.config, self.tokenizer, mesh.rank, mesh.layout.world, **self.media)

    def held_out(self, mesh: Mesh) -> list[FlatPack]:
        """This rank's part of the held-out packs; none if the run never evaluates."""
        if not self.config.train.eval_every:
            return []
        return read_held_out(self.config, self.tokenizer, mesh.rank, mesh.layout.world, **self.media)


def assemble(config: Config) -> Assembly:
    """The parts of the run that `config` describes. One place for training, `verify` and `data inspect`."""
    tokenizer = load_tokenizer(config.model)
    model = build_model(config.model, config.parallel.precision)
    check_vocabulary(model, tokenizer)
    return Assembly(config, tokenizer, model)
