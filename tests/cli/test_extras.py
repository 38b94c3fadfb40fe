"""Extras by purpose: messages about missing packages name them, and pyproject.toml declares them."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from omnizoo.cli.doctor import EXTRAS
from omnizoo.config.errors import UserError
from omnizoo.data.sources.remote import connect
from omnizoo.modalities.files.decoding import optional
from omnizoo.modalities.frozen_tokenizer import diffusers_package
from omnizoo.modalities.processor_needs import processor_packages

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_extra_in_messages_is_declared():
    named = set(EXTRAS)
    for file in (ROOT / "omnizoo").rglob("*.py"):
        named |= set(re.findall(r"""install_command\(["'](\w+)""", file.read_text()))
    assert {"media", "diffusers", "processors", "remote", "wandb"} <= named
    assert named <= set(DECLARED)


def test_extra_all_contains_every_extra_for_users():
    (requirement,) = map(Requirement, DECLARED["all"])
    assert requirement.extras == set(DECLARED) - {"all", "dev", "docs"}


@pytest.mark.parametrize(
    ("call", "missing", "extra"),
    [
        (lambda: optional("soundfile"), "soundfile", "media"),
        (lambda: diffusers_package("VQModel"), "diffusers", "diffusers"),
        (lambda: connect("s3://bucket/rows.jsonl"), "s3fs", "remote"),
    ],
)
def test_missing_package_is_one_line_with_its_extra(monkeypatch, call, missing, extra):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=rf"pip install 'omnizoo\[{extra}\]'") as caught:
        call()
    assert missing in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "packages"),
    [("qwen3_vl", ["torchvision"]), ("llama4", ["torchvision"]), ("gemma3", []), ("qwen2_audio", []), ("qwen3", [])],
)
def test_processor_needs_depend_on_the_family(model_type, packages):
    assert processor_packages(model_type) == packages
