"""What `omnizoo generate` prints: the assistant's turn, to its end and no further, as a reader wants it."""

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
    writer = load_chat_model(tmp_path)
    say(writer.model, answer)
    pieces = writer.write("What is the capital of France?")
    assert writer.text(pieces) == "The capital is Paris."
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in pieces[0].ids

    monkeypatch.setattr("omnizoo.generation.chat_model.load_chat_model", lambda *_, **__: writer)
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
        writer = load_chat_model(tmp_path)
        say(writer.model, tokenizer.encode(f"yes{end} and no"))
        assert writer.text(writer.write("so?")) == "yes"


def test_text_is_shown_as_it_is_written_and_never_half_a_character_or_a_control_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = publish(tmp_path)
    writer = load_chat_model(tmp_path)
    said = "Grüße aus \x1b[2JParis.\n\tOui €"
    say(writer.model, tokenizer.encode(f"{said}<|im_end|>"))
    shown: list[str] = []
    monkeypatch.setattr("sys.stdout.write", shown.append)
    terminal = Terminal(writer, tmp_path)
    writer.answer(writer.renderer.prompt("Where?"), on_piece=terminal.show)
    before_the_end = len(shown)
    terminal.end()
    assert before_the_end > 5  # not all at once
    assert "".join(shown) == said.replace("\x1b", "") + "\n"
    assert not any("\ufffd" in text for text in shown)


def read_answers(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_prompts_answered_together_are_answered_as_each_is_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path / "model")
    questions = ["What is the capital of France?", "Why?", "Say it again, and say all of it."]
    how = ["--max-tokens", "12", "--seed", "3", "--temperature", "1.5"]
    asked = ["generate", str(tmp_path / "model"), *how, "--out", str(tmp_path / "out.jsonl")]
    alone = []
    for question in questions:
        assert main([*asked, "--prompt", question]) == 0
        alone += read_answers(tmp_path / "out.jsonl")
    capsys.readouterr()
    assert main([*asked, *(part for question in questions for part in ("--prompt", question))]) == 0
    out = capsys.readouterr().out
    assert read_answers(tmp_path / "out.jsonl") == alone
    assert [answer["prompt"] for answer in alone] == questions
    assert len({answer["answer"] for answer in alone}) > 1
    assert out.count("--- ") == 3

    rows = [{"messages": [{"role": "user", "content": question}], "id": 7} for question in questions]
    rows[1]["messages"] += [{"role": "assistant", "content": "Because."}]  # what is known is not shown to the model
    write_rows(tmp_path / "rows.jsonl", rows)
    assert main([*asked, "--messages", str(tmp_path / "rows.jsonl")]) == 0
    together = read_answers(tmp_path / "out.jsonl")
    assert [answer["answer"] for answer in together] == [answer["answer"] for answer in alone]
    assert [answer.get("expected") for answer in together] == [None, "Because.", None]


def test_a_run_or_a_checkpoint_is_asked_as_its_export_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_an_adapter_is_merged_to_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path / "model")
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
    assert "its adapter merged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": 3}\n', "row 2 cannot be used: `messages`"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messa', "line 2: cannot be read as JSON"),
        ("7\n8\n", "line 1: a list of messages was expected"),
        ("\n", "is empty"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "no prompt"),
    ],
)
def test_a_bad_row_of_prompts_is_one_line(
    rows: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path)
    (tmp_path / "rows.jsonl").write_text(rows)
    capsys.readouterr()
    asked = ["generate", str(tmp_path), "--messages", str(tmp_path / "rows.jsonl"), "--max-tokens", "2"]
    assert main([*asked, "--out", str(tmp_path / "out.jsonl")]) == 2
    err = capsys.readouterr().err
    assert line in " ".join(err.split())


def test_a_folder_that_holds_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["generate", str(tmp_path / "empty"), "--prompt", "What?"]) == 2
    assert "neither a Hugging Face folder (config.json) nor a run" in " ".join(capsys.readouterr().err.split())
