"""The zoo: which families have a recipe of their own, and which tests stand behind what each is said to support."""

import inspect
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from omnizoo.recipes.base import Recipe

# Every family takes part in one of these, parametrised by its name; a mark is printed because the test exists.
PROOF = "tests/test_zoo.py::test_family_agrees_with_one_process_on_any_layout"
OMNI_PROOF = "tests/test_zoo.py::test_omni_family_agrees_with_one_process_on_any_layout"
# HSDP shards as FSDP does, over half of the ranks: one layout shows both.
CAPABILITIES = {"FSDP": "rep2.dp2", "HSDP": "rep2.dp2", "SP": "uly2.ring2", "EP": "dp2.uly2.ep4"}


@dataclass(frozen=True)
class Entry:
    family: str
    recipe: Recipe
    lines: int
    is_moe: bool
    is_omni: bool  # reads more than text

    def proof(self, capability: str) -> str | None:
        """The test behind a mark; None where the family does not have the capability."""
        proof = OMNI_PROOF if self.is_omni else PROOF
        return None if capability == "EP" and not self.is_moe else f"{proof}[{self.family}]"


def families() -> list[Entry]:
    folder = Path(__file__).parent
    found = []
    for info in iter_modules([str(folder)]):
        module = import_module(f"{__package__}.{info.name}")
        recipe = getattr(module, "RECIPE", None)
        if isinstance(recipe, Recipe):
            lines = len(inspect.getsource(module).splitlines())
            found.append(Entry(info.name, recipe, lines, _is_moe(info.name), recipe.modalities is not None))
    return found


def _is_moe(family: str) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family).get_text_config()
    return getattr(config, "num_experts_per_tok", None) is not None
