"""What every trainer of the benchmark is given: a tokenizer of words, documents, and small models with random weights.

One word of the text is one token, so counts of tokens are known from the text alone.
"""

import json
import math
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SPECIAL = ["<pad>", "<eos>", "<unk>"]
PAD, EOS = 0, 1
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True}


def make_assets(folder: Path, vocabulary: int = 32_000, documents: int = 2000, seed: int = 0) -> None:
    """`text.jsonl`, and a folder for each model, with its tokenizer."""
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rng, words = random.Random(seed), vocabulary - len(SPECIAL)
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(documents):
            length = int(min(1023, max(50, rng.lognormvariate(math.log(280), 0.7))))
            text = " ".join(f"w{int(rng.random() ** 3 * words)}" for _ in range(length))  # some words often
            file.write(json.dumps({"text": text}) + "\n")
    torch.manual_seed(seed)
    made = {
        "dense": lambda: Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **SHAPE)),
        "moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=vocabulary, **SHAPE, **EXPERTS)),
    }
    for name, build in made.items():
        build().save_pretrained(folder / name)
        tokenizer(vocabulary).save_pretrained(folder / name)
    (folder / "complete").touch()


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    ids = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(vocabulary - len(SPECIAL)))])}
    words = Tokenizer(tokenizer_models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
