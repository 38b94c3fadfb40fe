"""Responses that are generated several at a time equal those that are generated one by one."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import make_tokenizer
from tiny import FAMILIES, model_config
from transformers import AutoConfig, AutoModelForCausalLM

from omnizoo.config.errors import UserError
from omnizoo.generation.chat_model import ChatModel, Request, load_chat_model
from omnizoo.modalities.sampling import Sampling

PROMPTS = [
    "What is the capital of France?",
    "Why?",
    "a pack holds samples of many rows, and every sample sees only itself",
    "the order of packs is the same for any number of ranks: one process, two, four or eight",
    "so (yes) [no] {maybe}",
]
GREEDY = Sampling(temperature=0)


def load(family: str, folder: Path) -> ChatModel:
    """Return a small model with random weights that are large enough for the prompts to matter."""
    torch.manual_seed(0)
    fields = model_config(family) if family in FAMILIES else {"model_type": family, "vocab_size": 512, **SMALL[family]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return load_chat_model(folder)


# Learned positions; a recurrent family; positions that only the mask determines.
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "state_size": 8,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}


def ids_of(responses: list[list[Any]]) -> list[list[int]]:
    return [[token for piece in pieces for token in piece.ids] for pieces in responses]


@pytest.mark.parametrize("family", [*FAMILIES, *SMALL])
def test_responses_do_not_depend_on_the_batch(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(family, tmp_path)
    sampled = Sampling(temperature=1.5, top_k=40, top_p=0.95)
    for sampling in (GREEDY, sampled):
        alone = ids_of(model.write_all(PROMPTS, sampling, max_tokens=14, seed=3, batch=1))
        for batch in (2, 5):
            assert ids_of(model.write_all(PROMPTS, sampling, max_tokens=14, seed=3, batch=batch)) == alone
        assert len(set(map(tuple, alone))) > 2 or family in ("gemma2", "mamba2")  # prompts matter
    separate = [model.write(prompt, GREEDY, max_tokens=14) for prompt in PROMPTS]
    assert ids_of(separate) == ids_of(model.write_all(PROMPTS, GREEDY, max_tokens=14))
    assert (model.support.obstacle is None) == (family != "mamba2")
    warnings = [record for record in caplog.records if "one prompt at a time" in record.getMessage()]
    assert len(warnings) == (model.support.obstacle is not None)  # logged once


def test_responses_leave_and_join_a_batch_at_different_times(tmp_path: Path) -> None:
    """Responses end after different numbers of tokens, and the next prompts take their places."""
    model = load("gpt_oss", tmp_path)
    prompts = [f"{prompt} {number}" for number in range(3) for prompt in PROMPTS]
    alone = ids_of([model.write(prompt, GREEDY, max_tokens=20) for prompt in prompts])
    stop = alone[0][4]  # so some responses end early
    vars(model.model)["generation_config"].eos_token_id = stop
    expected = [ids[: ids.index(stop)] if stop in ids else ids for ids in alone]
    assert len({len(ids) for ids in expected}) > 1
    assert ids_of(model.write_all(prompts, GREEDY, max_tokens=20, batch=4)) == expected


def test_model_that_ignores_padding_generates_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load("llama", tmp_path)
    alone = ids_of(model.write_all(PROMPTS, GREEDY, max_tokens=8, batch=1))
    caplog.set_level(logging.WARNING)
    original = type(model.model).forward

    def forward(self: Any, *args: Any, attention_mask: Any = None, **inputs: Any) -> Any:
        return original(self, *args, **inputs)

    monkeypatch.setattr(type(model.model), "forward", forward)
    assert ids_of(model.write_all(PROMPTS, GREEDY, max_tokens=8, batch=3)) == alone
    assert model.support.obstacle is not None
    assert caplog.text.count("one prompt at a time") == 1


def test_one_bad_prompt_does_not_end_the_others(tmp_path: Path) -> None:
    model = load("qwen3", tmp_path)
    model.tokenizer.chat_template = None  # the prompt is the text as it is
    prompts = [model.prompt(text) for text in PROMPTS]
    empty = model.prompt("")
    requests = [Request(prompt, GREEDY) for prompt in (prompts[0], empty, prompts[1])]
    outcomes = dict(model.answers(requests, max_tokens=4, batch=2))
    assert isinstance(outcomes[1], UserError)
    assert ids_of([outcomes[0], outcomes[2]]) == ids_of([model.write(text, GREEDY, 4) for text in PROMPTS[:2]])
