"""No field of a row is dropped silently. More rows are in corpus_rows.py."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus_rows import OBSERVES, PUBLISHED, THINKS, TOOLS
from fixtures import CHATML, make_tokenizer
from tiny import read_steps, write_config, write_rows
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    PretrainedConfig,
    VipLlavaForConditionalGeneration,
)

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.sections.model import ModelSection
from omnizoo.data.rendering.renderer import Renderer
from omnizoo.data.rendering.template_analysis import read_template
from omnizoo.data.row import BadRow
from omnizoo.models.build import build_model
from omnizoo.models.media.model_inputs import read_modalities, unread_inputs

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def verdict(renderer: Renderer, row: dict[str, Any]) -> str:
    try:
        return str([sample.input_ids.tolist() for sample in renderer.render_samples(row)])
    except BadRow as bad:
        return str(bad)


@pytest.mark.parametrize("template", [CHATML, TOOLS, THINKS, OBSERVES])
def test_result_of_a_row_does_not_depend_on_earlier_rows(tmp_path: Path, template: str) -> None:
    # else the rows left out, and so the data, would depend on how lanes are spread over processes
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}
    rows: list[dict[str, Any]] = [
        {"messages": CHAT},
        {"messages": [{"role": "system", "content": "h"}, *CHAT]},
        {"messages": [CHAT[0] | {"name": "ann"}, CHAT[1]]},
        {"messages": [CHAT[0], CHAT[1] | {"reasoning_content": "hm"}]},
        {"messages": [CHAT[0], CHAT[1] | {"reasoning_content": "hm"}, *CHAT]},
        {"messages": [CHAT[0], call, {"role": "tool", "content": "h"}, CHAT[1]]},
        {"messages": CHAT, "tools": [{"name": "f"}]},
        {"messages": CHAT, "weight": 1},
        {"messages": CHAT, "weight": 2},
        {"messages": [CHAT[0], {"role": "observation", "content": "y"}, CHAT[1]]},
    ]
    tokenizer = make_tokenizer(tmp_path, template)
    alone = [verdict(Renderer(tokenizer, True), row) for row in rows]
    forward = Renderer(tokenizer, True)
    backward = Renderer(tokenizer, True)
    assert [verdict(forward, row) for row in rows] == alone
    assert [verdict(backward, row) for row in reversed(rows)] == alone[::-1]


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        ("{% for m in messages %}{{ m.role }}{{ m['content'] }}{% endfor %}", {"role", "content"}),
        ("{% for m in messages %}{% for call in m.calls %}{{ call.name }}{% endfor %}{% endfor %}", {"calls"}),
        ("{% set rest = messages[1:] %}{% for m in rest %}{{ m.a }}{% endfor %}{{ messages[0].b }}", {"a", "b"}),
        ("{% for m in messages | selectattr('a') %}{{ m.get('b') }}{% if 'c' in m %}x{% endif %}{% endfor %}",
         {"a", "b", "c", "get"}),
        ("{% macro w(m, c) %}{{ m.a }}{{ c.b }}{% endmacro %}{% for x in messages %}{{ w(x, x.c) }}{% endfor %}",
         {"a", "c"}),
        ("{% set ns = namespace(l=none) %}{% for m in messages %}{% set ns.l = m %}{% endfor %}{{ ns.l.a }}", {"a"}),
        ("{% for m in messages %}{{ loop.previtem.a if loop.previtem else m.b }}{% endfor %}", {"a", "b"}),
        ("{% for m in messages %}{% generation %}{{ m.a }}{% endgeneration %}{% endfor %}", {"a"}),
        ("{% for m in messages %}{{ m | tojson }}{% endfor %}", None),
        ("{{ messages }}", None),
        ("{% for m in messages %}{% for k, v in m.items() %}{{ k }}{% endfor %}{% endfor %}", None),
        ("{% for m in messages %}{{ m[key] }}{% endfor %}", None),
        ("{% for m in messages %", None),
    ],
)  # fmt: skip
def test_template_analysis_returns_message_fields(template: str, fields: set[str] | None) -> None:
    assert read_template(template).fields == fields


@pytest.mark.parametrize("family", PUBLISHED)
def test_multimodal_model_without_recipe_needs_text_only(family: str) -> None:
    config = PUBLISHED[family]
    model = build_model(ModelSection(config=config), "fp32")
    with pytest.raises(UserError, match=r"^model: .* reads image.*model\.text_only: true"):
        read_modalities(model, ModelSection(config=config))
    assert 511 in read_modalities(model, ModelSection(config=config, text_only=True))["reserved"]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64),
        MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=64),  # has a config inside its config
        Gemma3TextConfig(  # shares code with one that reads pictures
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_text_models_have_no_unread_inputs(config: PretrainedConfig) -> None:
    with torch.device("meta"):
        assert unread_inputs(AutoModelForCausalLM.from_config(config)) == []


def test_text_only_training_matches_separate_language_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fields = dict(PUBLISHED["vipllava"])
    whole = VipLlavaForConditionalGeneration(AutoConfig.for_model(fields.pop("model_type"), **fields))
    alone = LlamaForCausalLM(whole.config.text_config)
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    losses = []
    for name, model in (("whole", whole), ("alone", alone)):
        model.save_pretrained(tmp_path / name / "weights")
        path = write_config(
            tmp_path / name,
            model={"config": None, "path": str(tmp_path / name / "weights"), "text_only": True},
            train={"steps": 3, "packs_per_step": 2},
            optimizer={"weight_decay": 0.5},
        )
        assert main(["train", str(path)]) == 0
        losses.append([(step["loss"], step["grad_norm"]) for step in read_steps(tmp_path / name / "run")])
    assert len(losses[0]) == 3
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-6, atol=1e-6)


def test_reserved_placeholder_in_text_raises(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, special_tokens=("<pic>",))
    renderer = Renderer(tokenizer, True, reserved=[tokenizer.convert_tokens_to_ids("<pic>")])
    assert len(renderer.render({"text": "a pic"}).input_ids)
    with pytest.raises(BadRow, match="'<pic>'"):
        renderer.render({"text": "a <pic>"})


def test_bad_rows_are_red_on_terminal_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path)
    rows = write_rows(tmp_path / "texts.jsonl", [{"messages": CHAT, "image": "a.png"}] * 4)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    for others in ([], [{"messages": CHAT}] * 4):
        write_rows(tmp_path / "chats.jsonl", others or [{"messages": CHAT, "image": "b.png"}] * 4)
        assert main(["data", "inspect", str(config), "--out", str(tmp_path / "page.html")]) == 2
        said = capsys.readouterr()
        assert f"\x1b[1;31m4 bad rows, the first: \x1b[0m\x1b[31m{rows}:" in said.out
        assert said.err.count("error: ") == 1
        assert "`image` is not used" in said.err
        page = (tmp_path / "page.html").read_text()
        assert f'<td class="bad">{rows}:1: `image` is not used' in page
        assert re.search(r"^\.bad\b[^{]*\{ color: var\(--bad\) \}", page, re.MULTILINE)
