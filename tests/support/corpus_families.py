"""Families that a run would teach something else than what its user believes: each is refused in one line."""

from functools import partial
from pathlib import Path

from corpus import Case

ROOT = Path(__file__).parents[2]
ENCODERS = ("bert", "roberta", "roberta-prelayernorm", "camembert", "data2vec-text", "ernie", "xlm-roberta")
NO_BLOCKS = ("electra", "bert-generation", "roc_bert", "xmod")
MIX_SAMPLES = ("opt", "xglm", "bloom", "falcon", "mpt", "bart", "mbart", "plbart", "trocr")
NO_INTERFACE = ("gptj", "gpt_neo", "stablelm", "xlnet", "openai-gpt", "whisper")
RECURRENT = ("recurrent_gemma", "rwkv")
STATE = ("mamba", "jamba", "falcon_mamba", "minimax")
INDEXED = ("glm5_next", "deepseek_v32", "glm_moe_dsa")
CANNOT_RUN = ("axk2",)


def train(folder: Path, family: str, attention: str = "auto") -> list[object]:
    model = ["--model.config", f"{{model_type: {family}}}", "--model.attention", attention]
    where = ["--log.dir", folder / "run", "--model.tokenizer", ROOT / "examples/data/tiny/tokenizer"]
    data = ["--data.sources", f"[{{path: {ROOT / 'examples/data/tiny/stories.jsonl'}}}]", "--data.eval_sources", "[]"]
    return ["train", ROOT / "examples/text_tiny.yaml", *model, *where, *data, "--evaluation.every", "0"]


def case(family: str, says: tuple[str, ...], attention: str = "auto") -> Case:
    return Case(f"{family} with attention {attention}", partial(train, family=family, attention=attention), says)


CASES = [
    *(case(family, ("attends to later tokens", "is_decoder: true")) for family in ENCODERS),
    *(case(family, ("_no_split_modules",)) for family in NO_BLOCKS),
    *(case(family, ("attends across the samples of a pack", "sdpa"), "sdpa") for family in MIX_SAMPLES),
    *(case(family, ("attends across the samples of a pack", "eager"), "eager") for family in MIX_SAMPLES[:5]),
    *(case(family, ("does not use transformers' attention interface",)) for family in NO_INTERFACE),
    *(case(family, ("sample boundaries",)) for family in (*STATE, *RECURRENT)),
    *(case(family, ("sample boundaries",), "sdpa") for family in RECURRENT),
    case("zamba2", ("share weights",)),
    *(case(family, ("by an index",)) for family in INDEXED),
    *(case(family, ("cannot run on packs without a mask",)) for family in CANNOT_RUN),
]
