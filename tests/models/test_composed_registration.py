"""Composed models are registered with transformers before their configs are read, in any process."""

import subprocess
import sys

CODE = """
import omnizoo.models.read_config
from transformers import AutoConfig, AutoModelForCausalLM
from omnizoo.models.media.composed_config import OmniConfig
assert isinstance(AutoConfig.for_model("omnizoo"), OmniConfig)
assert OmniConfig in AutoModelForCausalLM._model_mapping
"""


def test_reading_configs_registers_composed_models_in_a_new_process() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
