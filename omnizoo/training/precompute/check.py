"""Check that precomputed sources fit the frozen components of the model."""

from torch import nn

from omnizoo.config.errors import UserError
from omnizoo.config.schema import Config
from omnizoo.data.loading.reader import Reader
from omnizoo.data.sources.base import RowSource
from omnizoo.data.sources.precomputed import CODES, DIFFUSION, PrecomputedRows, check_fingerprints
from omnizoo.data.sources.renamed_columns import RenamedRows
from omnizoo.data.sources.subset import RowSubset
from omnizoo.models.diffusion.recipe import denoiser_recipe
from omnizoo.models.diffusion.samples import pipeline_of
from omnizoo.training.precompute.codes_stage import codes_hashes
from omnizoo.training.precompute.diffusion_stages import diffusion_hashes


def check_precomputed(reader: Reader, config: Config, model: nn.Module) -> None:
    """Check that the rows were precomputed with the frozen components of the model.

    It reads parts of their weights, so only one rank should call it.

    Raises:
        UserError: If a component differs.
    """
    indexes = [source.content for source in precomputed_rows(reader)]
    if not indexes:
        return
    is_diffusion = denoiser_recipe(model) is not None
    kind = DIFFUSION if is_diffusion else CODES
    for index in indexes:
        if index.kind != kind:
            raise UserError(f"{index.folder}: the rows were precomputed for another kind of model ({index.kind})")
    if is_diffusion:
        folder = pipeline_of(config.model)
        expected = diffusion_hashes(folder)
        key = folder.key
    else:
        expected = codes_hashes(config.model, config.model.modalities)
        key = "model.modalities"
    check_fingerprints(indexes, expected, key)


def precomputed_rows(reader: Reader) -> list[PrecomputedRows]:
    """Return the precomputed sources of a reader."""
    sources = map(_inner_source, reader.sources)
    return [source for source in sources if isinstance(source, PrecomputedRows)]


def _inner_source(source: RowSource) -> RowSource:
    """Return the source behind selections and renamed columns."""
    while isinstance(source, RenamedRows | RowSubset):
        source = source.source
    return source
