"""What `omnizoo generate` prints: the assistant's turn, to its end and no further, as a reader wants it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import CHATML, SPECIAL_TOKENS, make_tokenizer
from tiny import model_config
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from omnizoo.assembly.writer import load_writer
from omnizoo.cli.main import main
from omnizoo.data.render import Renderer

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{% for message in messages %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else 'user' }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
NEXT_TURN = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
THINKING = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}",
)
TAGGED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ message['content'] }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>user\n{{ message['content'] }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
ALWAYS_PROMPTS = CHATML.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")
TEMPLATES = {
    "ChatML with a newline after the end": (CHATML, "<|im_end|>"),
    "Llama 3": (LLAMA3, "<|eot_id|>"),
    "Gemma": (GEMMA, "<end_of_turn>"),
    "Mistral, which ends by eos": (MISTRAL, "<|endoftext|>"),
    "a turn that ends where the next begins": (NEXT_TURN, "<|user|>"),
    "an empty thinking block": (THINKING, "<|im_end|>"),
    "generation tags around the newline, too": (TAGGED, "<|im_end|>"),
    "a prompt after every conversation": (ALWAYS_PROMPTS, "<|im_end|>"),
    "no token at all": (PLAIN, None),
}
ADDED = [
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_special", [True, False])
def test_the_end_of_a_turn_is_found_in_the_template(name: str, is_special: bool, tmp_path: Path) -> None:
    """Whether or not the tokenizer counts its token among the special ones."""
    template, expected = TEMPLATES[name]
    tokenizer = make_tokenizer(tmp_path, template, special_tokens=tuple(ADDED) if is_special else ())
    tokenizer.add_tokens([*ADDED, "<think>", "</think>"])
    ends = Renderer(tokenizer, False).end_of_turn()
    assert [tokenizer.convert_ids_to_tokens(token) for token in ends] == ([expected] if expected else [])
    assert expected in (None, "<|endoftext|>") or ends[0] not in tokenizer.all_special_ids


def publish(folder: Path, template: str = CHATML, **generation: Any) -> PreTrainedTokenizerFast:
    torch.manual_seed(0)
    fields = model_config("qwen3")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(folder)
    return make_tokenizer(folder, template)


def say(model: Any, ids: Sequence[int]) -> Any:
    """Make `model` write these, one after the other, and the last one ever after."""
    left = list(ids)

    def speak(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        token = left.pop(0) if len(left) > 1 else left[0]
        return logits.index_fill(-1, torch.tensor([token]), 1e4)

    return model.get_output_embeddings().register_forward_hook(speak)


def test_an_answer_ends_at_the_end_of_the_turn_and_shows_no_special_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = publish(tmp_path)
    answer = tokenizer.encode("<|pad|>The capital<|im_start|> is Paris.<|im_end|>\n<|im_start|>user\nand so on")
    writer = load_writer(tmp_path)
    say(writer.model, answer)
    pieces = writer.write("What is the capital of France?")
    assert writer.text(pieces) == "The capital is Paris."
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in pieces[0].ids

    monkeypatch.setattr("omnizoo.assembly.writer.load_writer", lambda *_, **__: writer)
    writer.model.get_output_embeddings()._forward_hooks.clear()
    say(writer.model, answer)
    assert main(["generate", str(tmp_path), "--prompt", "What is the capital of France?"]) == 0
    assert capsys.readouterr().out == "The capital is Paris.\n"


@pytest.mark.parametrize("ends", ["<|pad|>", ["<|endoftext|>", "<|pad|>"]])
def test_every_end_that_the_generation_config_names_is_one(ends: str | list[str], tmp_path: Path) -> None:
    names = SPECIAL_TOKENS
    ids = names.index(ends) if isinstance(ends, str) else [names.index(end) for end in ends]
    tokenizer = publish(tmp_path, PLAIN, eos_token_id=ids)
    for end in [ends] if isinstance(ends, str) else ends:
        writer = load_writer(tmp_path)
        say(writer.model, tokenizer.encode(f"yes{end} and no"))
        assert writer.text(writer.write("so?")) == "yes"
