"""Imports of a new process: each stage loads only what it needs. One process serves all tests, as imports take long."""

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys
import omnizoo
loaded = {"package": sorted(sys.modules)}

import omnizoo.models.read_config
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("omnizoo")
model = AutoModelForCausalLM._model_mapping[type(config)]
composed = [type(config).__name__, model.__name__]

import omnizoo.reporting.progress, omnizoo.training.callbacks.loggers, omnizoo.training.loop
loaded["training"] = sorted(sys.modules)
print(json.dumps({"loaded": loaded, "composed": composed}))
"""
OPTIONAL = {"datasets", "pyarrow", "pandas", "peft", "tensorboard", "triton", "trl", "diffusers", "wandb", "torchao"}
OPTIONAL |= {"sklearn", "soundfile", "av", "fsspec.implementations.http"}


@pytest.fixture(scope="module")
def new_process() -> dict[str, dict[str, list[str]]]:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, list[str]]] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_importing_the_package_does_not_import_torch(new_process: dict[str, dict[str, list[str]]]) -> None:
    assert not {"torch", "numpy", "transformers"} & set(new_process["loaded"]["package"])


def test_reading_configs_registers_composed_models(new_process: dict[str, dict[str, list[str]]]) -> None:
    assert new_process["composed"] == ["OmniConfig", "OmniModel"]


def test_training_does_not_import_optional_packages(new_process: dict[str, dict[str, list[str]]]) -> None:
    loaded = set(new_process["loaded"]["training"])
    assert "torch" in loaded
    assert not OPTIONAL & loaded
