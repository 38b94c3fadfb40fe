"""The families with a separate recipe file, and the tests that prove the capabilities listed for each of them."""

import ast
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from omnizoo.models.recipe import Recipe

# Every family is a parameter of one of these tests. A capability is listed only if such a test exists.
PROOF = "tests/recipes/test_zoo.py::test_family_agrees_with_one_process_on_any_layout"
OMNI_PROOF = "tests/recipes/test_zoo.py::test_omni_family_agrees_with_one_process_on_any_layout"
# HSDP shards like FSDP, but over half of the ranks, so one layout tests both.
CAPABILITIES = {"FSDP": "rep2.dp2", "HSDP": "rep2.dp2", "SP": "uly2.ring2", "EP": "dp2.uly2.ep4"}

# Causal language models of transformers that `omnizoo verify --families many` checks, with a recipe file or the default
# recipe. docs/reference/families.md lists the results.
MANY = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3"),
    *("glm4_moe", "phi3", "phi", "olmo", "olmo2", "olmo3", "starcoder2", "granite", "glm", "glm4", "smollm3", "cohere"),
    *("cohere2", "exaone4", "gpt_neox", "gemma", "gemma2", "gemma3n_text", "ministral", "hunyuan_v1_dense", "helium"),
    *("ernie4_5", "arcee", "apertus", "nemotron", "seed_oss", "gpt2", "gpt_bigcode", "opt", "persimmon", "bitnet"),
    *("diffllama", "nanochat", "minicpm3", "lfm2", "modernbert-decoder", "qwen2_moe", "granitemoe", "phimoe", "dots1"),
    *("deepseek_v2", "glm4_moe_lite", "hunyuan_v1_moe", "jetmoe", "ernie4_5_moe", "minimax_m2", "llama4_text"),
    *("gemma4_text", "longcat_flash", "flex_olmo", "bloom", "falcon", "mpt", "gptj", "gpt_neo", "stablelm", "xglm"),
    *("bert", "roberta", "electra", "mamba", "mamba2", "rwkv", "bamba", "jamba", "qwen3_next", "deepseek_v32"),
    *("qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"),
)

# Families that cannot be trained: `model_type` of the config -> reason. tests/recipes/test_zoo.py
# checks that they raise an error.
MAMBA_1 = "Mamba-1 layers are not supported: each channel of each state has a separate decay"
INLINE = "the code of its recurrent layers is inline, so OmniZoo cannot replace it"
INDEXED = "an index selects the tokens that it attends to, across the samples of a pack"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), MAMBA_1),
    "zamba2": "several layers share one block, and FSDP2 cannot shard weights that blocks share",
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm"), INLINE),
    **dict.fromkeys(("glm5_next", "qwen4_exp_text"), INDEXED),
}
# Families without media support. If they generate text, `model.text_only: true` allows training on text.
NO_MEDIA: dict[str, str] = {
    "phi4_multimodal": "its audio tower uses the global random generator of numpy in training",
    "higgs_audio_v2": "it generates only speech codes, of a codec that its folder does not contain",
}


@dataclass(frozen=True)
class FamilyEntry:
    """A family with a separate recipe file, and its capabilities."""

    family: str
    recipe: Recipe
    lines: int  # lines of the recipe file
    shared_lines: int  # lines of directly or indirectly imported recipe files that are not families
    is_moe: bool
    has_expert_parallelism: bool  # whether expert parallelism can distribute its experts
    is_omni: bool  # whether the family has modalities other than text

    def proof(self, capability: str) -> str | None:
        """Return the test that proves a capability; None if the family does not have the capability."""
        proof = OMNI_PROOF if self.is_omni else PROOF
        return None if capability == "EP" and not self.has_expert_parallelism else f"{proof}[{self.family}]"


def families() -> list[FamilyEntry]:
    """Return the families with a separate recipe file, in alphabetical order."""
    folder = Path(__file__).parent
    names = [info.name for info in iter_modules([str(folder)]) if not info.ispkg]
    modules = {name: import_module(f"{__package__}.{name}") for name in names}
    return [_entry(name, module) for name, module in modules.items() if _is_family(module)]


def _entry(family: str, module: ModuleType) -> FamilyEntry:
    recipe = module.RECIPE
    is_moe = bool(recipe.has_experts) or _is_moe(family)
    return FamilyEntry(
        family=family,
        recipe=recipe,
        lines=_count_lines(module),
        shared_lines=sum(_count_lines(used) for used in _imported_recipes(module) if not _is_family(used)),
        is_moe=is_moe,
        has_expert_parallelism=is_moe and recipe.has_experts is not False,
        is_omni=recipe.modalities is not None,
    )


def _is_family(module: ModuleType) -> bool:
    return isinstance(getattr(module, "RECIPE", None), Recipe)


def _source(module: ModuleType) -> str:
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def _count_lines(module: ModuleType) -> int:
    return len(_source(module).splitlines())


def _imported_recipes(module: ModuleType) -> list[ModuleType]:
    """Return the recipe modules, including shared ones, that `module` imports directly or indirectly."""
    reached: dict[str, ModuleType] = {}
    waiting = [module]
    while waiting:
        for node in ast.walk(ast.parse(_source(waiting.pop()))):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith(str(__package__)):
                continue
            names = {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            for name in names & sys.modules.keys() - reached.keys() - {Recipe.__module__}:
                reached[name] = sys.modules[name]
                waiting.append(reached[name])
    return list(reached.values())


def _is_moe(family: str) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family).get_text_config()
    return getattr(config, "num_experts_per_tok", None) is not None
