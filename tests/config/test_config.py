"""Config: files and overrides give the same typed values, mistakes are named one per line, and saving round-trips."""

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
from omnizoo.config.foreign_keys import MOVED_KEYS, OUR_KEYS
from omnizoo.config.load import load_config
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


def test_a_file_without_options_has_the_defaults_of_the_schema(load):
    config = load(SMALL)
    assert config == Config(
        model=ModelSection(config={"model_type": "qwen3", "num_hidden_layers": 4}),
        data=DataSection(sources=[SourceSettings(path="a.jsonl")]),
    )


@pytest.mark.parametrize("lr", ["1e-3", "1E-3", "+1e-3", "0.001", ".001", "1.0e-3", "1.e-3", "1_0e-4"])
def test_every_spelling_of_a_float_is_a_float_in_files_and_overrides(load, lr):
    assert load(SMALL + f"train: {{lr: {lr}}}").train.lr == 0.001
    assert load(SMALL, "--train.lr", lr).train.lr == 0.001
    assert load(SMALL, f"--model.config.rms_norm_eps={lr}").model.config["rms_norm_eps"] == 0.001


def test_an_integer_is_fine_where_a_number_is_expected(load):
    lr = load(SMALL, "--train.lr", "1").train.lr
    assert (lr, type(lr)) == (1.0, float)


def test_overrides_win_over_the_file_and_the_last_one_wins(load):
    config = load(SMALL + "train: {steps: 3}", "--train.steps", "4", "--log.dir=runs/a=b", "--train.steps=5")
    assert (config.train.steps, config.log.dir) == (5, "runs/a=b")


def test_overrides_reach_list_items_and_inline_model_configs(load):
    config = load(
        SMALL,
        *("--data.sources.0.path", "b.jsonl", "--data.sources.1.path", "c.jsonl", "--data.eval_sources.0.path", "d"),
        *("--model.config.num_hidden_layers", "2", "--model.config.rope.theta", "1e6"),
    )
    assert [s.path for s in config.data.sources] == ["b.jsonl", "c.jsonl"]
    assert config.data.eval_sources == [SourceSettings(path="d")]
    assert config.model.config == {"model_type": "qwen3", "num_hidden_layers": 2, "rope": {"theta": 1e6}}


def test_overrides_reach_the_parts_of_a_composed_model_whether_or_not_the_file_has_them(load):
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


def test_a_whole_list_can_be_given_as_yaml(load):
    config = load(SMALL, "--data.sources", "[{path: x, weight: 2}, {path: y}]", "--optimizer.no_decay", "[norm]")
    assert config.data.sources == [SourceSettings(path="x", weight=2.0), SourceSettings(path="y")]
    assert config.optimizer.no_decay == ["norm"]


def test_negative_numbers_and_null_are_values(load):
    config = load(SMALL, "--parallel.dp_shard", "-1", "--checkpoint.dir", "null")
    assert (config.parallel.dp_shard, config.checkpoint.dir) == (-1, None)


def test_an_override_of_an_aliased_item_changes_that_item_only(load):
    text = "model: {path: m}\ndata:\n  sources: &s [{path: a}]\n  eval_sources: *s\n"
    config = load(text, "--data.eval_sources.0.path", "b")
    assert (config.data.sources[0].path, config.data.eval_sources[0].path) == ("a", "b")


def test_merge_keys_may_be_overridden_without_counting_as_repeated(load):
    text = "model: {path: m}\ndata:\n  sources: [&s {path: a, weight: 2}, {<<: *s, path: b}]\n"
    assert load(text).data.sources == [SourceSettings(path="a", weight=2.0), SourceSettings(path="b", weight=2.0)]


@pytest.mark.parametrize("word", ["yes", "on", "010", "1:30", "2024-01-01", "="])
def test_words_that_yaml_1_1_would_convert_are_text(load, word):
    assert load(SMALL, "--log.dir", word).log.dir == word


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--train.stpes", "3"], "command line: train.stpes is not a key; did you mean train.steps?"),
        (["--train.pack_tokens", "3"], "command line: train.pack_tokens is not a key; did you mean data.pack_tokens?"),
        (["--trian.steps", "3"], "command line: trian.steps is not a key; did you mean train.steps?"),
        (
            ["--train.packs-per-step", "3"],
            "command line: train.packs-per-step is not a key; did you mean train.packs_per_step?",
        ),
        (
            ["--data.sources.0.pth", "b"],
            "command line: data.sources.0.pth is not a key; did you mean data.sources.0.path?",
        ),
        (["--train.dir", "b"], "command line: train.dir is not a key; did you mean checkpoint.dir or log.dir?"),
        (["--train.num_train_epochs", "3"], "train.num_train_epochs is not a key; here it is train.epochs"),
        (["--train.learning_rate", "1e-4"], "command line: train.learning_rate is not a key; here it is train.lr"),
        (["--data.cutoff_len", "9"], "data.cutoff_len is not a key; here it is data.pack_tokens, and data.overlong"),
        (["--model.lora_rank", "8"], "model.lora_rank is not a key; here it is model.adapter.rank"),
        (["--train.neftune_noise_alpha", "5"], "it is known from other tools, and not supported yet"),
        (["--data.packing", "true"], "data.packing is not a key; no key is needed: samples are always packed"),
        (["--train.epochs", "2", "--train.steps", "3"], "train.epochs and train.steps are both set"),
        (["--train.warmup_ratio", "0.1", "--train.warmup_steps", "3"], "train.warmup_ratio and train.warmup_steps"),
        (
            ["--train.tokens_per_step", "4096", "--train.packs_per_step", "2"],
            "train.tokens_per_step and train.packs_per_step",
        ),
        (["--train.tokens_per_step", "5000"], "train.tokens_per_step is 5000, and a step has whole packs"),
        (["--data.sources.0.format", "sharegpt"], 'data.sources.0.format is "sharegpt"; expected messages or text'),
        (["--data.sources.0.columns", "{text: a, messages: a}"], "columns reads 'a' under two names"),
        (["--train.xyzzy", "b"], "command line: train.xyzzy is not a key; `omnizoo train --help` lists all keys"),
        (["--train.steps", '"10"'], 'command line: train.steps is "10"; expected integer >= 1'),
        (["--train.steps", "1.5"], "command line: train.steps is 1.5; expected integer >= 1"),
        (["--train.steps", "true"], "command line: train.steps is true; expected integer >= 1"),
        (["--train.lr", "true"], "command line: train.lr is true; expected number > 0"),
        (["--train.lr", "0"], "command line: train.lr is 0; expected number > 0"),
        (["--data.pack_tokens", "1"], "command line: data.pack_tokens is 1; expected integer >= 2"),
        (["--data.shuffle", "yes"], 'command line: data.shuffle is "yes"; expected true or false'),
        (["--data.shuffle", "1"], "command line: data.shuffle is 1; expected true or false"),
        (
            ["--data.overlong", "cut"],
            'command line: data.overlong is "cut"; expected truncate or drop or split',
        ),
        (["--optimizer.weight_decay", "-1"], "command line: optimizer.weight_decay is -1; expected number >= 0"),
        (
            ["--optimizer.options.betas", "[0.9]"],
            "command line: optimizer.options.betas is [0.9]; expected list of 2: number >= 0, < 1",
        ),
        (
            ["--optimizer.options.eps", "9e99"],
            "command line: optimizer.options.eps is 9e+99; expected number > 0",
        ),
        (["--optimizer.no_decay", "[x]"], 'optimizer.no_decay is ["x"]; expected list of norm or bias or embedding'),
        (
            ["--train.eps", "1", "--optimizer.options.eps", "1"],
            "command line: train.eps is now optimizer.options.eps",
        ),
        (
            ["--model.config", "5"],
            "command line: model.config is 5; expected text or mapping or null; put it in quotes",
        ),
        (
            ["--model.foundation.pth", "x"],
            "command line: model.foundation.pth is not a key; did you mean model.foundation.path?",
        ),
        (
            ["--model.modalities.sensor.encoder.freze", "true"],
            "model.modalities.sensor.encoder.freze is not a key; did you mean model.modalities.sensor.encoder.freeze?",
        ),
        (
            ["--model.modalities.sensor.encodr.freeze", "true"],
            "model.modalities.sensor.encodr.freeze is not a key; did you mean model.modalities.sensor.encoder.freeze?",
        ),
        (
            ["--model.modalites.sensor.encoder.freeze", "true"],
            "model.modalites.sensor.encoder.freeze is not a key; did you mean model.modalities.sensor.encoder.freeze?",
        ),
        (
            ["--model.modalities.sensor.begin", "<s>"],
            "model.modalities.sensor.begin is not a key; did you mean model.modalities.sensor.marks.begin?",
        ),
        (["--train.path", "x"], "command line: train.path is not a key; did you mean model.path?"),
        (
            ["--model.modalities.sensor.encoder.lr", "0"],
            "command line: model.modalities.sensor.encoder.lr is 0; expected number > 0, <= 1000 or null",
        ),
        (
            ["--model.modalities.sensor.marks", "<s>"],
            'command line: model.modalities.sensor.marks is "<s>"; expected {begin, placeholder, end}',
        ),
        (
            ["--model.modalities.sensor.encoder", "{path: a, config: b}"],
            "command line: model.modalities.sensor.encoder: give one of path (weights) and config (random init)",
        ),
        (["--log.dir", "2024"], "command line: log.dir is 2024; expected text; put it in quotes, '\"...\"'"),
        (["--parallel.dp_shard", "0"], "command line: parallel.dp_shard is 0; give a positive number, or -1"),
        (["--model.path", "x"], "my.yaml:1 and command line: give exactly one of model.path"),
        (
            ["--data.sources.2.path", "b"],
            "command line: data.sources.2.path: data.sources is a list; expected an index from",
        ),
        (["--model.config.model_type.x", "1"], 'model.config.model_type is "qwen3"; expected a mapping'),
        (["--log.dir", "[a"], 'command line: --log.dir "[a": not valid YAML: expected'),
        (["--data.sources", "[{path: a, path: b}]"], "data.sources.0.path is set twice"),
        (["--data.shuffle"], "command line: --data.shuffle needs a value"),
        (["--data.shuffle", "--train.steps", "3"], "command line: --data.shuffle needs a value"),
        (["steps", "3"], "command line: unexpected argument 'steps'; overrides are written --section.key value"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_key_value_and_way_out(errors, overrides, expected):
    (line,) = errors(SMALL, *overrides)
    assert expected in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "my.yaml: the config is empty; expected the sections model, data"),
        ("# nothing\n", "my.yaml: the config is empty"),
        ("- a\n", 'my.yaml: the config is ["a"]; expected the sections model, data'),
        ("model: [\n", "my.yaml:2: not valid YAML: "),
        ("model:\n\tpath: x\n", "my.yaml:2: not valid YAML: found character '\\t'"),
        ("a: 1\n---\nb: 2\n", "my.yaml:2: not valid YAML: but found another document"),
        ("a: \x01\n", "my.yaml: not valid YAML: unacceptable character"),
        ("a: !!python/object/apply:os.getcwd []\n", "my.yaml:1: a has the YAML tag !!python/object/apply:os.getcwd"),
        (SMALL + "model: {path: b}\n", "my.yaml:5: model is set twice, first on line 1; keep one of them"),
        (SMALL + "train:\n  lr: 1\n  lr: 2\n", "my.yaml:7: train.lr is set twice, first on line 6"),
        (SMALL + "log: &a {dir: [*a]}\n", "my.yaml:5: log.dir.0 contains itself through a YAML alias"),
        (SMALL + "train:\n  steps: '10'\n", 'my.yaml:6: train.steps is "10"; expected integer >= 1'),
        (SMALL + "trian: {}\n", "my.yaml:5: trian is not a key; did you mean train?"),
        (
            SMALL + "train.lr: 3\n",
            "my.yaml:5: train.lr is not a key; in a file, keys are nested: `train:` and below it `lr:",
        ),
        (SMALL + "3: 4\n", "my.yaml:5: 3 is not a key"),
        (SMALL + "log:\n", "my.yaml:5: log is null; expected mapping"),
        ("model: {path: x}\n", "my.yaml: data is missing; expected mapping: sources of rows"),
        ("model: {path: x}\ndata: {}\n", "my.yaml:2: data.sources is missing; expected list of {path, weight, split, "),
        ("model: {path: x}\ndata: {sources: []}\n", "my.yaml:2: data.sources is []; expected list of"),
        (
            "model: {path: x}\ndata:\n  sources:\n  - weight: 1\n",
            "my.yaml:4: data.sources.0: path is missing, and so is rows; expected a file or folder",
        ),
        ("model: {path: x}\ndata: {sources: [a]}\n", 'my.yaml:2: data.sources is ["a"]; expected list of {path'),
        ("model: {}\ndata: {sources: [{path: a}]}\n", "my.yaml:1: give exactly one of model.path"),
        (
            "model: {config: {a: 1}}\ndata: {sources: [{path: a}]}\n",
            "my.yaml:1: model.config as a mapping needs a `model_type`",
        ),
        (
            "model:\n  foundation: {path: a}\n  modalities:\n    sensor: {encoder: {}}\ndata: {sources: [{path: a}]}\n",
            "my.yaml:4: model.modalities.sensor.encoder needs a kind: a built-in name, or `package.module:Class`",
        ),
        (
            "model:\n  foundation: {freeze: true}\ndata: {sources: [{path: a}]}\n",
            "my.yaml:2: model.foundation needs a path (weights) or a config (random init)",
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_names_line_key_value_and_way_out(errors, text, expected):
    (line,) = errors(text)
    assert expected in line


def test_all_mistakes_are_reported_at_once(errors):
    found = errors(SMALL + "train: {steps: 0, lrr: 1}\n", "--log.every", "0")
    assert [line.split(" is ")[0] for line in found] == [
        "my.yaml:5: train.steps",
        "my.yaml:5: train.lrr",
        "command line: log.every",
    ]


def test_a_long_value_is_shortened_in_the_message(errors):
    (line,) = errors(SMALL, "--train.steps", "[" + "1, " * 1000 + "]")
    assert len(line) < 160


def test_missing_and_unreadable_files_are_named(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"\xff")
    for path, reason in [
        ("nope.yaml", "no such config file"),
        ("", "cannot be read"),
        ("latin.yaml", "cannot be read"),
    ]:
        with pytest.raises(UserError, match=reason) as caught:
            load_config(tmp_path / path)
        assert str(tmp_path / path) in str(caught.value)
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
def test_a_saved_config_loads_to_an_equal_one(tmp_path_factory, inline, name, lr):
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    config = Config(
        model=ModelSection(config=inline | {"model_type": name}),
        data=DataSection(sources=[SourceSettings(path=name, weight=lr)]),
        train=TrainSection(lr=lr),
        optimizer=OptimizerSection(options={"betas": [0.1, 1e-8]}, groups=[ParameterGroupSettings(match=name, lr=lr)]),
    )
    save_config(config, path)
    assert load_config(path) == config


def test_a_failed_save_leaves_the_old_file_and_no_other(load, tmp_path, monkeypatch):
    config = load(SMALL)
    before = Path("my.yaml").read_text()

    def full_disk(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        save_config(config, "my.yaml")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"my.yaml": before}


def test_loading_a_config_imports_neither_torch_nor_transformers(load):
    load(SMALL)
    code = (
        "import sys; from omnizoo.config.load import load_config; load_config('my.yaml'); "
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_key_has_a_description_and_can_be_set_to_its_default(load):
    data = "data: {sources: [{path: a}], eval_sources: [{path: b}]}\noptimizer: {groups: [{match: c}], ema: {}}\n"
    whole = "model: {path: a, adapter: {}, modalities: {sensor: {encoder: {}, projector: {}, decoder: {}}}}\n" + data
    composed = "model: {foundation: {path: a}}\n" + data
    whole += 'log: {callbacks: [{kind: "a:B"}]}\nevaluation: {metrics: [{kind: accuracy}]}\n'
    evaluated = whole.replace("evaluation: {", "evaluation: {every: 1, early_stop: {}, ")
    keys = reference.all_keys()
    assert {"model.foundation.path", "model.modalities.NAME.encoder.kind"} <= {key.key for key in keys}
    for key in keys:
        assert key.description, key.key
        if key.default == "required" or key.key.endswith(("model.path", "model.foundation.path", "sources.N.path")):
            continue
        text = composed if key.key.startswith("model.foundation.") else whole
        text = evaluated if key.key.startswith("evaluation.early_stop.") else text
        changed = load(text, f"--{key.key.replace('.N.', '.0.').replace('.NAME.', '.sensor.')}", key.default)
        holds_others = any(other.key.startswith(f"{key.key}.") for other in keys)
        assert changed == load(text) or holds_others, key.key


@pytest.mark.parametrize(("old", "new"), MOVED_KEYS.items())
def test_a_moved_key_is_an_error_that_names_the_new_key(load, old, new):
    section, _, name = old.partition(".")
    message = f"{old} is now {new}"
    with pytest.raises(UserError) as in_file:
        load(SMALL + f"{section}: {{{name}: 1}}\n")
    assert str(in_file.value).endswith(f".yaml:{len(SMALL.splitlines()) + 1}: {message}")
    with pytest.raises(UserError) as on_command_line:
        load(SMALL, f"--{old}", "1")
    assert str(on_command_line.value) == f"command line: {message}"
    with pytest.raises(UserError) as in_python:
        load_config(yaml.safe_load(SMALL) | {section: {name: 1}})
    assert str(in_python.value) == f"config: {message}"


def test_keys_below_a_moved_key_move_with_it(load):
    with pytest.raises(
        UserError, match=r"^command line: train.early_stop.patience is now evaluation.early_stop.patience$"
    ):
        load(SMALL, "--train.early_stop.patience", "3")


def test_weights_in_checkpoint_resume_are_now_model_init_from(load):
    with pytest.raises(UserError, match=r"^command line: checkpoint.resume: weights:a/b is now model.init_from: a/b"):
        load(SMALL, "--checkpoint.resume", "weights:a/b")


def test_new_keys_are_the_targets_of_moved_ones():
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
        ("train: {steps: " + "[" * 100_000, "nested more than 64 deep"),
        ("train: {steps: " + "9" * 5000 + "}\n", "train.steps is a number of 5,000 digits"),
        ('log: {dir: "a\\0b"}\n', "log.dir has a character"),
        ("# " + "x" * 2**20, "bytes"),
    ],
)
def test_a_file_that_would_take_time_without_end_is_refused_at_once(tmp_path, text, reason):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=reason) as caught:
        load_config(tmp_path / "bad.yaml")
    assert "\n" not in str(caught.value)


def test_a_pipe_is_refused_without_waiting_for_who_writes_to_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UserError, match="not an ordinary file"):
        load_config(tmp_path / "pipe.yaml")


def test_names_of_other_tools_lead_to_keys_that_exist():
    keys = {key.key for key in reference.all_keys()} | set(reference.sections())
    sections = "|".join(reference.sections())
    assert len(OUR_KEYS) >= 40
    for name, said in OUR_KEYS.items():
        assert reference.schema_key(f"train.{name}") not in keys or said == f"train.{name}", name
        for key in re.findall(rf"\b(?:{sections})\.[a-zA-Z_.]+", said):
            known = key.rstrip(".:")
            assert known in keys or ".options" in known, f"{name}: {known}"


@pytest.mark.parametrize("train", ["{epochs: 2.5, warmup_ratio: 0.1}", "{tokens_per_step: 16384}"])
def test_what_follows_from_another_key_is_not_saved_with_it(load, tmp_path, train):
    config = load(SMALL + f"train: {train}\n")
    save_config(config, tmp_path / "saved.yaml")
    again = load_config(tmp_path / "saved.yaml")
    assert again == config
    assert again.train.packs_per_step == 8
    assert again.data.lanes == config.data.lanes


def test_epochs_and_weights_of_sources_contradict_each_other(errors):
    sources = "[{path: a, weight: 2}, {path: b}]"
    (line,) = errors(SMALL, "--train.epochs", "1", "--data.sources", sources)
    assert "train.epochs reads every row equally often, but data.sources have the weights 2, 1" in line
