"""Tests of `omnizoo generate`: it prints the response up to the end of the turn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import CHATML, SPECIAL_TOKENS, make_tokenizer
from tiny import model_config, write_config, write_rows
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from omnizoo.cli.generate import Terminal
from omnizoo.cli.main import main
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.generation.chat_model import load_chat_model

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
def test_end_of_turn_is_inferred_from_template(name: str, is_special: bool, tmp_path: Path) -> None:
    """The end token may be a special token of the tokenizer or not."""
    template, expected = TEMPLATES[name]
    tokenizer = make_tokenizer(tmp_path, template, special_tokens=tuple(ADDED) if is_special else ())
    tokenizer.add_tokens([*ADDED, "<think>", "</think>"])
    ends = Renderer(tokenizer, False).end_of_turn()
    assert [tokenizer.convert_ids_to_tokens(token) for token in ends] == ([expected] if expected else [])
    assert expected in (None, "<|endoftext|>") or ends[0] not in tokenizer.all_special_ids


def save_model(folder: Path, template: str = CHATML, **generation: Any) -> PreTrainedTokenizerFast:
    """Save a small model with random weights, and return its tokenizer."""
    torch.manual_seed(0)
    fields = model_config("qwen3")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(folder)
    return make_tokenizer(folder, template)


def force_tokens(model: Any, ids: Sequence[int]) -> Any:
    """Make `model` generate these tokens in order, and repeat the last one."""
    remaining = list(ids)

    def replace_logits(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        token = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        return logits.index_fill(-1, torch.tensor([token]), 1e4)

    return model.get_output_embeddings().register_forward_hook(replace_logits)


def test_response_ends_with_the_turn_and_has_no_special_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = save_model(tmp_path)
    answer = tokenizer.encode("<|pad|>The capital<|im_start|> is Paris.<|im_end|>\n<|im_start|>user\nand so on")
    writer = load_chat_model(tmp_path)
    force_tokens(writer.model, answer)
    pieces = writer.write("What is the capital of France?")
    assert writer.text(pieces) == "The capital is Paris."
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in pieces[0].ids

    monkeypatch.setattr("omnizoo.generation.chat_model.chat_model_of", lambda *_: writer)
    writer.model.get_output_embeddings()._forward_hooks.clear()
    force_tokens(writer.model, answer)
    assert main(["generate", str(tmp_path), "--prompt", "What is the capital of France?"]) == 0
    assert capsys.readouterr().out == "The capital is Paris.\n"


@pytest.mark.parametrize("ends", ["<|pad|>", ["<|endoftext|>", "<|pad|>"]])
def test_every_eos_token_of_generation_config_ends_response(ends: str | list[str], tmp_path: Path) -> None:
    names = SPECIAL_TOKENS
    ids = names.index(ends) if isinstance(ends, str) else [names.index(end) for end in ends]
    tokenizer = save_model(tmp_path, PLAIN, eos_token_id=ids)
    for end in [ends] if isinstance(ends, str) else ends:
        writer = load_chat_model(tmp_path)
        force_tokens(writer.model, tokenizer.encode(f"yes{end} and no"))
        assert writer.text(writer.write("so?")) == "yes"


def test_text_is_streamed_without_partial_or_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = save_model(tmp_path)
    writer = load_chat_model(tmp_path)
    response = "Grüße aus \x1b[2JParis.\n\tOui €"
    force_tokens(writer.model, tokenizer.encode(f"{response}<|im_end|>"))
    printed: list[str] = []
    monkeypatch.setattr("sys.stdout.write", printed.append)
    terminal = Terminal(writer, tmp_path)
    writer.answer(writer.renderer.prompt("Where?"), on_piece=terminal.show)
    num_prints = len(printed)
    terminal.end()
    assert num_prints > 5  # not all at once
    assert "".join(printed) == response.replace("\x1b", "") + "\n"
    assert not any("\ufffd" in text for text in printed)


def read_answers(file: Path) -> list[dict[str, Any]]:
    """Return the records of a JSONL file of responses."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_responses_do_not_depend_on_other_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "model")
    prompts = ["What is the capital of France?", "Why?", "Say it again, and say all of it."]
    sampling = ["--max-tokens", "12", "--seed", "3", "--temperature", "1.5"]
    command = ["generate", str(tmp_path / "model"), *sampling, "--out", str(tmp_path / "out.jsonl")]
    separate = []
    for prompt in prompts:
        assert main([*command, "--prompt", prompt]) == 0
        separate += read_answers(tmp_path / "out.jsonl")
    capsys.readouterr()
    assert main([*command, *(f"--prompt={prompt}" for prompt in prompts)]) == 0
    out = capsys.readouterr().out
    assert read_answers(tmp_path / "out.jsonl") == separate
    assert [record["prompt"] for record in separate] == prompts
    assert len({record["answer"] for record in separate}) > 1
    assert out.count("--- ") == 3

    rows = [{"messages": [{"role": "user", "content": prompt}], "id": 7} for prompt in prompts]
    rows[1]["messages"] += [{"role": "assistant", "content": "Because."}]  # expected response: not part of the prompt
    write_rows(tmp_path / "rows.jsonl", rows)
    assert main([*command, "--messages", str(tmp_path / "rows.jsonl")]) == 0
    together = read_answers(tmp_path / "out.jsonl")
    assert [record["answer"] for record in together] == [record["answer"] for record in separate]
    assert [record.get("expected") for record in together] == [None, "Because.", None]


def test_run_and_checkpoint_generate_like_their_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_config(tmp_path, train={"steps": 1, "packs_per_step": 1}))]) == 0
    run, exported = tmp_path / "run", tmp_path / "exported"
    assert main(["export", str(run), str(exported)]) == 0
    answers = {}
    for place in (exported, run, run / "checkpoints" / "step_00000001"):
        capsys.readouterr()
        out = ["--out", str(tmp_path / "out.jsonl"), "--max-tokens", "8"]
        assert main(["generate", str(place), "--prompt", "What?", *out]) == 0
        assert ("is exported to a temporary folder" in capsys.readouterr().err) == (place != exported)
        answers[place] = (tmp_path / "out.jsonl").read_text()
    assert len(set(answers.values())) == 1


@pytest.mark.long
def test_adapter_is_merged_for_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(tmp_path / "model")
    model = {"config": None, "path": str(tmp_path / "model"), "tokenizer": None, "adapter": {"rank": 2}}
    path = write_config(tmp_path, model=model, train={"steps": 2, "packs_per_step": 1, "lr": 1.0})
    assert main(["train", str(path)]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    answers = []
    for place in (tmp_path / "merged", tmp_path / "run"):
        out = ["--out", str(tmp_path / "out.jsonl"), "--max-tokens", "8", "--temperature", "0"]
        assert main(["generate", str(place), "--prompt", "What?", *out]) == 0
        answers.append((tmp_path / "out.jsonl").read_text())
    assert answers[0] == answers[1]
    assert "adapter merged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (
            '{"messages": [{"role": "user", "content": "a"}]}\n{"messages": 3}\n',
            "rows.jsonl: row 2 cannot be used: `messages`",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messa', "rows.jsonl line 2: not valid JSON"),
        ("7\n8\n", "rows.jsonl line 1: expected"),
        ("\n", "rows.jsonl: the file is empty"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "no prompt"),
    ],
)
def test_bad_row_of_messages_prints_one_line(
    rows: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path)
    (tmp_path / "rows.jsonl").write_text(rows)
    capsys.readouterr()
    command = ["generate", str(tmp_path), "--messages", str(tmp_path / "rows.jsonl"), "--max-tokens", "2"]
    assert main([*command, "--out", str(tmp_path / "out.jsonl")]) == 2
    err = capsys.readouterr().err
    assert line in " ".join(err.split())


def test_folder_without_model_raises_with_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["generate", str(tmp_path / "empty"), "--prompt", "What?"]) == 2
    assert f"{tmp_path / 'empty'}: neither config.json" in " ".join(capsys.readouterr().err.split())
