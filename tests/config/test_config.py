"""Tests of config files and overrides: typed values, one line per mistake, and saving."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from omnizoo.config import reference
from omnizoo.config.errors import UserError
from omnizoo.config.foreign.base import NO_KEY, NOT_YET
from omnizoo.config.load import load_config
from omnizoo.config.moved_keys import MOVED_KEYS
from omnizoo.config.overrides import parse_overrides
from omnizoo.config.schema import Config
from omnizoo.config.sections.base import SubmoduleSettings
from omnizoo.config.sections.data import DataSection, SourceSettings
from omnizoo.config.sections.model import EncoderSettings, MarkSettings, ModalitySettings, ModelSection
from omnizoo.config.sections.optimizer import OptimizerSection, ParameterGroupSettings
from omnizoo.config.sections.train import TrainSection
from omnizoo.config.yaml_file import save_config

SMALL = """\
model:
  config: {model_type: qwen3, num_hidden_layers: 4}
data:
  sources: [{path: a.jsonl}]
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str, *overrides: str) -> Config:
        Path("my.yaml").write_text(text)
        return load_config("my.yaml", overrides)

    return load


@pytest.fixture
def errors(load):
    def errors(text: str, *overrides: str) -> list[str]:
        with pytest.raises(UserError) as caught:
            load(text, *overrides)
        return str(caught.value).splitlines()

    return errors


def test_file_without_options_has_defaults_of_schema(load):
    config = load(SMALL)
    assert config == Config(
        model=ModelSection(config={"model_type": "qwen3", "num_hidden_layers": 4}),
        data=DataSection(sources=[SourceSettings(path="a.jsonl")]),
    )


@pytest.mark.parametrize("lr", ["1e-3", "1E-3", "+1e-3", "0.001", ".001", "1.0e-3", "1.e-3", "1_0e-4"])
def test_every_spelling_of_a_float_is_parsed(load, lr):
    assert load(SMALL + f"train: {{lr: {lr}}}").train.lr == 0.001
    assert load(SMALL, "--train.lr", lr).train.lr == 0.001
    assert load(SMALL, f"--model.config.rms_norm_eps={lr}").model.config["rms_norm_eps"] == 0.001


def test_integer_is_accepted_as_number(load):
    lr = load(SMALL, "--train.lr", "1").train.lr
    assert (lr, type(lr)) == (1.0, float)


def test_last_override_takes_precedence_over_file(load):
    config = load(SMALL + "train: {steps: 3}", "--train.steps", "4", "--log.dir=runs/a=b", "--train.steps=5")
    assert (config.train.steps, config.log.dir) == (5, "runs/a=b")


def test_overrides_set_list_items_and_inline_model_configs(load):
    config = load(
        SMALL,
        *("--data.sources.0.path", "b.jsonl", "--data.sources.1.path", "c.jsonl", "--data.eval_sources.0.path", "d"),
        *("--model.config.num_hidden_layers", "2", "--model.config.rope.theta", "1e6"),
    )
    assert [s.path for s in config.data.sources] == ["b.jsonl", "c.jsonl"]
    assert config.data.eval_sources == [SourceSettings(path="d")]
    assert config.model.config == {"model_type": "qwen3", "num_hidden_layers": 2, "rope": {"theta": 1e6}}


def test_overrides_create_missing_submodules_of_composed_model(load):
    text = SMALL.replace("config: {", "foundation: {config: {").replace("4}", "4}}")
    config = load(
        text,
        *("--model.foundation.config.num_hidden_layers", "2", "--model.foundation.lr", "1e-5"),
        *("--model.modalities.sensor.encoder.kind", "my:Sensor", "--model.modalities.sensor.encoder.freeze=true"),
        *("--model.modalities.sensor.encoder.options.size", "8", "--model.modalities.sensor.marks.begin", "<s>"),
    )
    assert config.model.foundation == SubmoduleSettings(config={"model_type": "qwen3", "num_hidden_layers": 2}, lr=1e-5)
    encoder = EncoderSettings(kind="my:Sensor", freeze=True, options={"size": 8})
    assert config.model.modalities == {"sensor": ModalitySettings(encoder=encoder, marks=MarkSettings(begin="<s>"))}


def test_override_sets_a_list_as_yaml(load):
    config = load(SMALL, "--data.sources", "[{path: x, weight: 2}, {path: y}]", "--optimizer.no_decay", "[norm]")
    assert config.data.sources == [SourceSettings(path="x", weight=2.0), SourceSettings(path="y")]
    assert config.optimizer.no_decay == ["norm"]


def test_negative_numbers_and_null_are_values(load):
    config = load(SMALL, "--parallel.dp_shard", "-1", "--checkpoint.dir", "null")
    assert (config.parallel.dp_shard, config.checkpoint.dir) == (-1, None)


def test_override_of_aliased_item_changes_only_that_item(load):
    text = "model: {path: m}\ndata:\n  sources: &s [{path: a}]\n  eval_sources: *s\n"
    config = load(text, "--data.eval_sources.0.path", "b")
    assert (config.data.sources[0].path, config.data.eval_sources[0].path) == ("a", "b")


def test_override_of_aliased_item_unsets_exclusive_keys_only_in_that_item(load):
    text = "model: {path: m}\ndata:\n  sources: &s [{rows: 'a:b', options: {c: 1}}]\n  eval_sources: *s\n"
    config = load(text, "--data.eval_sources.0.path", "b")
    assert config.data.sources == [SourceSettings(rows="a:b", options={"c": 1})]
    assert config.data.eval_sources == [SourceSettings(path="b")]


NEEDED_KEYS = ("model.path", "model.foundation.path", "sources.N.path")  # a complete config needs one of them


def complete_config(key: str) -> str:
    """Return a config file in which the section of `key` exists."""
    data = "data: {sources: [{path: a}], eval_sources: [{path: b}]}\noptimizer: {groups: [{match: c}], ema: {}}\n"
    if key.startswith("model.foundation."):
        return "model: {foundation: {path: a}}\n" + data
    text = "model: {path: a, adapter: {}, modalities: {sensor: {encoder: {}, projector: {}, decoder: {}}}}\n" + data
    text += 'log: {callbacks: [{kind: "a:B"}]}\ntrain: {losses: [{}], batch_warmup: {steps: 3}}\n'
    text += "checkpoint: {export: {every: 2}}\nevaluation: {metrics: [{kind: accuracy}]}\n"
    if key.startswith("evaluation.early_stop."):
        text = text.replace("evaluation: {", "evaluation: {every: 1, early_stop: {}, ")
    return text


# Values of mutually exclusive keys, by section.
EXCLUSIVE_VALUES = {
    "model": {"path": "p", "config": {"model_type": "qwen3"}, "foundation": {"path": "p"}, "given": "g"},
    "model.foundation": {"path": "p", "config": {"model_type": "qwen3"}},
    "model.modalities.NAME.encoder": {"path": "p", "config": {"model_type": "qwen3"}},
    "model.modalities.NAME.decoder": {"path": "p", "config": {"model_type": "qwen3"}},
    "model.adapter": {"path": "p", "kind": "dora", "rank": 4, "alpha": 8.0, "targets": ["q"], "exclude": ["q"]}
    | {"modules_to_save": ["q"], "init": "random", "rank_pattern": {"q": 2}, "alpha_pattern": {"q": 4.0}}
    | {"experts": "shared", "bias": "all"},
    "data.sources.N": {"path": "p", "rows": "a:b", "given": "g"},
    "data.eval_sources.N": {"path": "p", "rows": "a:b", "given": "g"},
    "train": {"epochs": 2.0, "steps": 5, "warmup_ratio": 0.5, "warmup_steps": 3}
    | {"tokens_per_step": 4096, "packs_per_step": 4, "samples_per_step": 16},
    "optimizer.groups.N": {"freeze": True, "lr": 0.1, "weight_decay": 0.1, "kind": "muon", "options": {"eps": 0.1}},
}
# Keys that are only valid together with another key of the same alternative.
NEEDS_ANOTHER_KEY = {("model", "module"): "config", ("data.sources.N", "options"): "rows"} | {
    ("data.eval_sources.N", "options"): "rows"
}


def exclusive_pairs() -> list[tuple[str, str, str]]:
    """Return every section, key, and key that it replaces."""
    pairs = []
    for section, exclusive in reference.exclusive_keys().items():
        for key, others in exclusive.items():
            if (section, key) not in NEEDS_ANOTHER_KEY:
                pairs += [(section, key, other) for other in others if (section, other) not in NEEDS_ANOTHER_KEY]
    return pairs


def with_exclusive(section: str, values: dict) -> dict:
    """Return a config in which `section` has `values`."""
    config: dict = {"model": {"path": "m"}, "data": {"sources": [{"path": "d"}]}, "optimizer": {"groups": []}}
    encoders = {"encoder": {"kind": "a:B"}, "decoder": {"kind": "a:B"}}
    if section.startswith("model"):
        config["model"] = {"foundation": {"path": "f"}, "modalities": {"NAME": encoders}}
    if section == "model.adapter":
        config["model"] = {"path": "m", "adapter": values}
    elif section == "model":
        config["model"] = values
    elif section == "model.foundation":
        config["model"]["foundation"] = values
    elif section.startswith("model.modalities"):
        encoders[section.rpartition(".")[2]] |= values
    elif section == "optimizer.groups.N":
        config["optimizer"]["groups"] = [{"match": "*"} | values]
    elif section == "train":
        config["train"] = values
    else:
        config["data"][section.split(".")[1]] = [values]
    return config


@pytest.mark.parametrize(("section", "key", "other"), exclusive_pairs())
def test_override_replaces_exclusive_key_of_the_file(load, errors, section, key, other):
    values = EXCLUSIVE_VALUES[section]
    errors(yaml.dump(with_exclusive(section, {key: values[key], other: values[other]})))
    before = with_exclusive(section, {other: values[other]})
    after = with_exclusive(section, {key: values[key]})
    override = f"--{section.replace('.N.', '.0.').removesuffix('.N')}"
    override += f"{'.0' if section.endswith('.N') else ''}.{key}"
    assert load(yaml.dump(before), override, json.dumps(values[key])) == load(yaml.dump(after))


def test_override_of_a_nested_key_replaces_exclusive_section(load):
    text = "model: {module: 'a:b', config: {size: 8}}\ndata: {sources: [{rows: 'a:b', options: {c: 1}}]}\n"
    config = load(text, "--model.foundation.path", "m", "--data.sources.0.path", "d")
    assert config.model == ModelSection(foundation=SubmoduleSettings(path="m"))
    assert config.data.sources == [SourceSettings(path="d")]


def test_adapter_rank_on_the_command_line_does_not_replace_the_adapter_folder(errors):
    (line,) = errors(SMALL.replace("model:\n", "model:\n  adapter: {path: p}\n"), "--model.adapter.rank", "4")
    assert "model.adapter: path: " in line


def keys_by_config() -> dict[str, list[str]]:
    """Return all keys that have a default and no nested keys, by the config in which their section exists."""
    keys = reference.all_keys()
    configs: dict[str, list[str]] = {}
    for key in keys:
        has_nested_keys = any(other.key.startswith(f"{key.key}.") for other in keys)
        if key.default != "required" and not has_nested_keys and not key.key.endswith(NEEDED_KEYS):
            flag = key.key.replace(".N.", ".0.").replace(".NAME.", ".sensor.")
            configs.setdefault(complete_config(key.key), []).append(flag)
    return configs


def test_null_on_the_command_line_unsets_every_key_that_has_a_default(load):
    for text, keys in keys_by_config().items():
        assert load(text, *(f"--{key}=null" for key in keys)) == load(text)


def test_null_in_the_file_unsets_every_key_that_has_a_default(load):
    for text, keys in keys_by_config().items():
        values = yaml.safe_load(text)
        for key in keys:
            *parents, name = key.split(".")
            container = values
            for part in parents:
                container = container[int(part)] if isinstance(container, list) else container.setdefault(part, {})
            container[name] = None
        assert load(yaml.dump(values)) == load(text)


@pytest.mark.parametrize("value", ["null", "~", ""])
def test_null_on_the_command_line_restores_the_default_of_a_key_in_the_file(load, value):
    text = SMALL + "train: {epochs: 2, lr: 0.5, losses: [{kind: dpo, options: {beta: 0.5}}]}\ncheckpoint: {every: 9}\n"
    changes = [f"--train.epochs={value}", f"--train.lr={value}", f"--checkpoint={value}"]
    config = load(text, *changes, f"--train.losses.0.options.beta={value}", f"--model.adapter.rank={value}")
    plain = load(SMALL + "train: {losses: [{kind: dpo}]}\n")
    assert config == plain
    assert config.train.model_dump() == plain.train.model_dump()


def test_null_on_the_command_line_removes_a_named_entry(load):
    text = "model:\n  foundation: {path: m}\n  modalities: {sensor: {encoder: {kind: 'a:B'}}}\n"
    config = load(text + "data: {sources: [{path: d}]}\n", "--model.modalities.sensor", "null")
    assert config.model.modalities == {}


def test_null_is_a_value_for_options_of_a_plugin(load):
    config = load(SMALL + "train: {losses: [{kind: 'a:B', options: {size: null}}]}\n")
    assert config.train.losses[0].options == {"size": None}


def test_null_of_an_unknown_key_is_an_error(errors):
    (line,) = errors(SMALL, "--trian.steps", "null")
    assert "trian.steps " in line


def test_merged_key_can_be_overridden(load):
    text = "model: {path: m}\ndata:\n  sources: [&s {path: a, weight: 2}, {<<: *s, path: b}]\n"
    assert load(text).data.sources == [SourceSettings(path="a", weight=2.0), SourceSettings(path="b", weight=2.0)]


@pytest.mark.parametrize("word", ["yes", "on", "010", "1:30", "2024-01-01", "="])
def test_words_that_yaml_1_1_converts_are_text(load, word):
    assert load(SMALL, "--log.dir", word).log.dir == word


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--train.stpes", "3"], ["train.stpes", "train.steps?"]),
        (["--train.pack_tokens", "3"], ["train.pack_tokens", "data.pack_tokens?"]),
        (["--trian.steps", "3"], ["trian.steps", "train.steps?"]),
        (["--train.packs-per-step", "3"], ["train.packs-per-step", "train.packs_per_step?"]),
        (["--data.sources.0.pth", "b"], ["data.sources.0.pth", "data.sources.0.path?"]),
        (["--train.dir", "b"], ["train.dir", "checkpoint.dir or log.dir?"]),
        (["--train.num_train_epochs", "3"], ["train.num_train_epochs", "train.epochs"]),
        (["--train.learning_rate", "1e-4"], ["train.learning_rate", "train.lr"]),
        (["--data.cutoff_len", "9"], ["data.cutoff_len", "use data.pack_tokens (and data.overlong"]),
        (["--model.lora_rank", "8"], ["model.lora_rank", "model.adapter.rank"]),
        (["--train.neftune_noise_alpha", "5"], ["train.neftune_noise_alpha", NOT_YET]),
        (["--train.losses", "[{kind: dpo, beta: 0.1}]"], ["train.losses.0.beta", "train.losses.0.options.beta?"]),
        (["--optimizer.betas", "[0.9, 0.95]"], ["optimizer.betas", "optimizer.options.betas?"]),
        (["--train.bets", "1"], ["train.bets", "omnizoo train --help"]),
        (["--data.packing", "true"], ["data.packing", NO_KEY]),
        (["--train.epochs", "2", "--train.steps", "3"], ["train.epochs:", "train.steps"]),
        (["--train.warmup_ratio", "0.1", "--train.warmup_steps", "3"], ["train.warmup_ratio:", "train.warmup_steps"]),
        (
            ["--train.tokens_per_step", "4096", "--train.packs_per_step", "2"],
            ["train.tokens_per_step:", "train.packs_per_step"],
        ),
        (["--train.tokens_per_step", "5000"], ["train.tokens_per_step: 5000", "data.pack_tokens 2048", "4096 or 6144"]),
        (["--data.sources.0.format", "sharegpt"], ['data.sources.0.format is "sharegpt"', "messages or text"]),
        (["--data.sources.0.columns", "{text: a, messages: a}"], ["data.sources.0: columns:", "'a'"]),
        (["--train.xyzzy", "b"], ["train.xyzzy", "omnizoo train --help"]),
        (["--train.steps", '"10"'], ['train.steps is "10"', "integer >= 1"]),
        (["--train.steps", "1.5"], ["train.steps is 1.5", "integer >= 1"]),
        (["--train.steps", "true"], ["train.steps is true", "integer >= 1"]),
        (["--train.lr", "true"], ["train.lr is true", "number > 0"]),
        (["--train.lr", "0"], ["train.lr is 0", "number > 0"]),
        (["--data.pack_tokens", "1"], ["data.pack_tokens is 1", "integer >= 2"]),
        (["--data.shuffle", "yes"], ['data.shuffle is "yes"', "true or false"]),
        (["--data.shuffle", "1"], ["data.shuffle is 1", "true or false"]),
        (["--data.overlong", "cut"], ['data.overlong is "cut"', "truncate or drop or split"]),
        (["--optimizer.weight_decay", "-1"], ["optimizer.weight_decay is -1", "number >= 0"]),
        (["--optimizer.options.betas", "[0.9]"], ["optimizer.options.betas is [0.9]", "list of 2: number >= 0, < 1"]),
        (["--optimizer.options.eps", "9e99"], ["optimizer.options.eps is 9e+99", "number > 0"]),
        (["--optimizer.no_decay", "[x]"], ['optimizer.no_decay is ["x"]', "list of norm or bias or embedding"]),
        (["--train.eps", "1", "--optimizer.options.eps", "1"], ["train.eps", "optimizer.options.eps"]),
        (["--model.config", "5"], ["model.config is 5", "text or mapping or null", "quotes"]),
        (["--model.foundation.pth", "x"], ["model.foundation.pth", "model.foundation.path?"]),
        (
            ["--model.modalities.sensor.encoder.freze", "true"],
            ["model.modalities.sensor.encoder.freze", "model.modalities.sensor.encoder.freeze?"],
        ),
        (
            ["--model.modalities.sensor.encodr.freeze", "true"],
            ["model.modalities.sensor.encodr.freeze", "model.modalities.sensor.encoder.freeze?"],
        ),
        (
            ["--model.modalites.sensor.encoder.freeze", "true"],
            ["model.modalites.sensor.encoder.freeze", "model.modalities.sensor.encoder.freeze?"],
        ),
        (
            ["--model.modalities.sensor.begin", "<s>"],
            ["model.modalities.sensor.begin", "model.modalities.sensor.marks.begin?"],
        ),
        (["--train.path", "x"], ["train.path", "model.path?"]),
        (
            ["--model.modalities.sensor.encoder.lr", "0"],
            ["model.modalities.sensor.encoder.lr is 0", "number > 0, <= 1000 or null"],
        ),
        (
            ["--model.modalities.sensor.marks", "<s>"],
            ['model.modalities.sensor.marks is "<s>"', "{begin, placeholder, end}"],
        ),
        (
            ["--model.modalities.sensor.encoder", "{path: a, config: b}"],
            ["model.modalities.sensor.encoder:", "path and config"],
        ),
        (["--log.dir", "2024"], ["log.dir is 2024", "text", "'\"...\"'"]),
        (["--parallel.dp_shard", "0"], ["parallel.dp_shard is 0", "-1"]),
        (["--model.path", "x", "--model.config.model_type", "y"], ["my.yaml:1 and command line: model: 2"]),
        (["--train.epochs", "2", "--train.steps", "9"], ["train.epochs: ", "train.steps"]),
        (["--data.sources.2.path", "b"], ["data.sources.2.path", "from 0 to 1", '"2"']),
        (["--model.config.model_type.x", "1"], ['model.config.model_type is "qwen3"', "mapping"]),
        (["--log.dir", "[a"], ['--log.dir "[a"', "YAML"]),
        (["--data.sources", "[{path: a, path: b}]"], ["data.sources.0.path", "twice"]),
        (["--data.shuffle"], ["--data.shuffle VALUE"]),
        (["--data.shuffle", "--train.steps", "3"], ["--data.shuffle VALUE"]),
        (["steps", "3"], ["'steps'", "--section.key value"]),
    ],
)
def test_wrong_override_is_one_line_with_key_value_and_fix(errors, overrides, expected):
    (line,) = errors(SMALL, *overrides)
    assert "command line: " in line
    for fragment in expected:
        assert fragment in line


@pytest.mark.parametrize(
    ("text", "line_number", "expected"),
    [
        ("", None, ["empty", "model, data"]),
        ("# nothing\n", None, ["empty"]),
        ("- a\n", None, ['["a"]', "model, data"]),
        ("model: [\n", 2, ["YAML"]),
        ("model:\n\tpath: x\n", 2, ["YAML", "'\\t'"]),
        ("a: 1\n---\nb: 2\n", 2, ["YAML", "another document"]),
        ("a: \x01\n", None, ["YAML", "unacceptable character"]),
        ("a: !!python/object/apply:os.getcwd []\n", 1, ["a ", "!!python/object/apply:os.getcwd"]),
        (SMALL + "model: {path: b}\n", 5, ["model ", "line 1"]),
        (SMALL + "train:\n  lr: 1\n  lr: 2\n", 7, ["train.lr ", "line 6"]),
        (SMALL + "log: &a {dir: [*a]}\n", 5, ["log.dir.0 ", "alias"]),
        (SMALL + "train:\n  steps: '10'\n", 6, ['train.steps is "10"', "integer >= 1"]),
        (SMALL + "trian: {}\n", 5, ["trian ", "train?"]),
        (SMALL + "train.lr: 3\n", 5, ["train.lr ", "`train:`", "`lr:"]),
        (SMALL + "3: 4\n", 5, ["3 "]),
        ("model:\ndata: {sources: [{path: a}]}\n", 1, ["model is null", "mapping"]),
        ("model: {path: x}\n", None, ["data ", "mapping: sources of rows"]),
        ("model: {path: x}\ndata: {}\n", 2, ["data.sources ", "list of {path, weight, split, "]),
        ("model: {path: x}\ndata: {sources: []}\n", 2, ["data.sources is []", "list of"]),
        ("model: {path: x}\ndata:\n  sources:\n  - weight: 1\n", 4, ["data.sources.0: path and rows", "missing"]),
        ("model: {path: x}\ndata: {sources: [a]}\n", 2, ['data.sources is ["a"]', "list of {path"]),
        ("model: {}\ndata: {sources: [{path: a}]}\n", 1, ["model: 0", "model.path"]),
        ("model: {config: {a: 1}}\ndata: {sources: [{path: a}]}\n", 1, ["model.config:", "`model_type`"]),
        (
            "model:\n  foundation: {path: a}\n  modalities:\n    sensor: {encoder: {}}\ndata: {sources: [{path: a}]}\n",
            4,
            ["model.modalities.sensor.encoder: kind ", "`package.module:Class`"],
        ),
        ("model:\n  foundation: {freeze: true}\ndata: {sources: [{path: a}]}\n", 2, ["model.foundation:", "config"]),
    ],
)
def test_wrong_file_is_one_line_with_key_value_and_fix(errors, text, line_number, expected):
    (line,) = errors(text)
    origin = "my.yaml: " if line_number is None else f"my.yaml:{line_number}: "
    assert line.startswith(origin)
    for fragment in expected:
        assert fragment in line


def test_all_mistakes_are_reported_at_once(errors):
    lines = errors(SMALL + "train: {steps: 0, lrr: 1}\n", "--log.every", "0")
    assert [line.split(" is ")[0] for line in lines] == [
        "my.yaml:5: train.steps",
        "my.yaml:5: train.lrr",
        "command line: log.every",
    ]


def test_long_value_is_shortened_in_message(errors):
    (line,) = errors(SMALL, "--train.steps", "[" + "1, " * 1000 + "]")
    assert len(line) < 160


@pytest.mark.parametrize("name", ["nope.yaml", "", "latin.yaml"])
def test_unreadable_file_raises_with_its_path(tmp_path, name):
    (tmp_path / "latin.yaml").write_bytes(b"\xff")
    path = tmp_path / name
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: ") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_overrides_are_parsed_in_both_spellings():
    changes = parse_overrides(["--train.lr", "1e-3", "--log.dir=a b", "--x.y=", "--z.0", "-1"])
    assert changes == {"train.lr": 0.001, "log.dir": "a b", "x.y": None, "z.0": -1}


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(words, inner), max_leaves=8)


@settings(deadline=None, max_examples=40)
@given(
    inline=st.dictionaries(words, nested),
    name=words.filter(bool)
    | st.sampled_from(["1e-3", "yes", "null", "~", "2024-01-01", "0x1F", "1_000", ".inf", "<<", "010", "="]),
    lr=st.floats(min_value=0, max_value=1000, exclude_min=True),
)
def test_saved_config_round_trips(tmp_path_factory, inline, name, lr):
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    config = Config(
        model=ModelSection(config=inline | {"model_type": name}),
        data=DataSection(sources=[SourceSettings(path=name, weight=lr)]),
        train=TrainSection(lr=lr),
        optimizer=OptimizerSection(options={"betas": [0.1, 1e-8]}, groups=[ParameterGroupSettings(match=name, lr=lr)]),
    )
    save_config(config, path)
    assert load_config(path) == config


def test_failed_save_keeps_old_file_only(load, tmp_path, monkeypatch):
    config = load(SMALL)
    before = Path("my.yaml").read_text()

    def full_disk(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"^my\.yaml: .*No space left on device"):
        save_config(config, "my.yaml")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"my.yaml": before}


def test_loading_a_config_does_not_import_torch_or_transformers(load):
    load(SMALL)
    code = (
        "import sys; from omnizoo.config.load import load_config; load_config('my.yaml'); "
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_key_has_a_description_and_accepts_its_default(load):
    keys = reference.all_keys()
    assert {"model.foundation.path", "model.modalities.NAME.encoder.kind"} <= {key.key for key in keys}
    for key in keys:
        assert key.description, key.key
        if key.default == "required" or key.key.endswith(NEEDED_KEYS):
            continue
        text = complete_config(key.key)
        flag = key.key.replace(".N.", ".0.").replace(".NAME.", ".sensor.")
        changed = load(text, f"--{flag}", key.default)
        has_nested_keys = any(other.key.startswith(f"{key.key}.") for other in keys)
        assert changed == load(text) or has_nested_keys, key.key


@pytest.mark.parametrize(("old", "new"), MOVED_KEYS.items())
def test_moved_key_raises_with_new_key(load, old, new):
    section, _, name = old.partition(".")
    keys = rf"{re.escape(old)}\b.* {re.escape(new)}"
    line = len(SMALL.splitlines()) + 1
    with pytest.raises(UserError, match=rf"^my\.yaml:{line}: {keys}"):
        load(SMALL + f"{section}: {{{name}: 1}}\n")
    with pytest.raises(UserError, match=f"^command line: {keys}"):
        load(SMALL, f"--{old}", "1")
    with pytest.raises(UserError, match=f"^config: {keys}"):
        load_config(yaml.safe_load(SMALL) | {section: {name: 1}})


def test_key_below_moved_key_raises_with_new_key(load):
    with pytest.raises(
        UserError, match=r"^command line: train\.early_stop\.patience .*evaluation\.early_stop\.patience$"
    ):
        load(SMALL, "--train.early_stop.patience", "3")


def test_resume_from_weights_raises_with_init_from(load):
    with pytest.raises(UserError, match=r"^command line: checkpoint\.resume: weights:a/b .*model\.init_from: a/b"):
        load(SMALL, "--checkpoint.resume", "weights:a/b")


def test_moved_keys_lead_to_existing_keys():
    keys = {key.key for key in reference.all_keys()}
    for new in MOVED_KEYS.values():
        key = new.partition(":")[0]
        assert key in keys or key.rpartition(".")[0] in keys


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
            "aliases",
        ),
        ("train: {steps: " + "[" * 100_000, "64 levels"),
        ("train: {steps: " + "9" * 5000 + "}\n", "train.steps has 5,000 digits"),
        ('log: {dir: "a\\0b"}\n', "log.dir .*NUL"),
        ("# " + "x" * 2**20, "bytes"),
    ],
)
def test_oversized_file_raises_quickly(tmp_path, text, reason):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=reason) as caught:
        load_config(tmp_path / "bad.yaml")
    assert "\n" not in str(caught.value)


def test_pipe_raises_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UserError, match=r"pipe\.yaml: not a regular file"):
        load_config(tmp_path / "pipe.yaml")


@pytest.mark.parametrize("train", ["{epochs: 2.5, warmup_ratio: 0.1}", "{tokens_per_step: 16384}"])
def test_derived_keys_are_not_saved(load, tmp_path, train):
    config = load(SMALL + f"train: {train}\n")
    save_config(config, tmp_path / "saved.yaml")
    again = load_config(tmp_path / "saved.yaml")
    assert again == config
    assert again.train.packs_per_step == 8
    assert again.data.lanes == config.data.lanes


def test_epochs_with_weighted_sources_raise(errors):
    sources = "[{path: a, weight: 2}, {path: b}]"
    (line,) = errors(SMALL, "--train.epochs", "1", "--data.sources", sources)
    assert "train.epochs: " in line
    assert "weights 2, 1" in line
