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

# Causal language models of transformers that `omnizoo verify --families many` goes through, with a recipe file or the
# default recipe: docs/families.md is what it finds.
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

# Families that cannot be trained here, by the `model_type` of their config, each with the reason in a line: what would
# have to change. tests/test_zoo.py sees that they are refused.
MAMBA_1 = "Mamba-1 layers: every channel of every state decays by itself, for which there is no rule of ours yet"
INLINE = "its layers carry a state by code of their own, through no function that could be replaced"
INDEXED = "an index picks what its attention sees, among all tokens of a pack, those of other samples too"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "zamba"), MAMBA_1),
    "zamba2": "several of its layers run one and the same block: FSDP2 cannot shard weights that blocks share",
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm"), INLINE),
    **dict.fromkeys(("glm5_next", "qwen4_exp_text"), INDEXED),
}
# Families whose media nothing feeds: `model.text_only: true` trains those that write text on text alone.
NO_MEDIA: dict[str, str] = {
    "phi4_multimodal": "its audio tower draws from numpy's global random numbers in training",
    "higgs_audio_v2": "it writes no text, only codes of speech of a codec that is not in its folder; not supported yet",
}


@dataclass(frozen=True)
class Entry:
    family: str
    recipe: Recipe
    lines: int
    is_moe: bool
    is_dealt: bool  # its experts can be dealt out to ranks
    is_omni: bool  # reads more than text

    def proof(self, capability: str) -> str | None:
        """The test behind a mark; None where the family does not have the capability."""
        proof = OMNI_PROOF if self.is_omni else PROOF
        return None if capability == "EP" and not self.is_dealt else f"{proof}[{self.family}]"


def families() -> list[Entry]:
    folder = Path(__file__).parent
    found = []
    for info in iter_modules([str(folder)]):
        module = import_module(f"{__package__}.{info.name}")
        recipe = getattr(module, "RECIPE", None)
        if isinstance(recipe, Recipe):
            lines = len(inspect.getsource(module).splitlines())
            is_moe = bool(recipe.has_experts) or _is_moe(info.name)
            is_dealt = is_moe and recipe.has_experts is not False
            found.append(Entry(info.name, recipe, lines, is_moe, is_dealt, recipe.modalities is not None))
    return found


def _is_moe(family: str) -> bool:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family).get_text_config()
    return getattr(config, "num_experts_per_tok", None) is not None
