"""The small copy that `omnizoo verify` and the probe run, of complete models as they are published."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.config.schema import Config
from omnizoo.models.build import build_model
from omnizoo.models.check_config_fields import config_of
from omnizoo.verification.small_run import shrink

ROOT = Path(__file__).parents[2]
UNDECLARED = {  # nested fields that published folders contain and transformers does not declare
    "qwen2_5_omni_talker": "token2wav_config.dit_config.text_num_embeds_of_v1",
    "qwen3_omni_talker": "talker_config.audio_end_token_id",
}


def example(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / f"examples/published/{name}.yaml").read_text())
    return content


def with_field(name: str) -> dict[str, Any]:
    """The config of the example's model with one more nested field."""
    fields: dict[str, Any] = example(name)["model"]["config"]
    *parents, field = UNDECLARED[name].split(".")
    section = fields
    for parent in parents:
        section = section[parent]
    section[field] = 5
    return fields


def config_from_folder(name: str, folder: Path) -> Config:
    (folder / "config.json").write_text(json.dumps(with_field(name)))
    config = example(name)
    del config["model"]["config"]
    config["model"]["path"] = str(folder)
    (folder / "train.yaml").write_text(yaml.safe_dump(config))
    return load_config(str(folder / "train.yaml"), [])


@pytest.mark.parametrize("name", UNDECLARED)
def test_undeclared_nested_field_of_folder_is_left_out(name: str, tmp_path: Path) -> None:
    config = config_from_folder(name, tmp_path)
    small = shrink(config, world=2, precision="fp32")
    assert build_model(small.model, "fp32", "meta").config.model_type == example(name)["model"]["config"]["model_type"]


@pytest.mark.parametrize("name", UNDECLARED)
def test_undeclared_nested_field_in_config_file_raises(name: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.config\.{UNDECLARED[name]}: not a field"):
        config_of(with_field(name), "model.config")


@pytest.mark.long
@pytest.mark.parametrize("name", UNDECLARED)
def test_verify_accepts_folder_with_undeclared_nested_field(name: str, tmp_path: Path) -> None:
    config_from_folder(name, tmp_path)
    assert main(["verify", str(tmp_path / "train.yaml"), "--world", "2", "--layouts", "dp2"]) == 0


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 3)])
def test_small_copy_of_omni_model_with_few_heads_runs(heads: int, kv_heads: int, tmp_path: Path) -> None:
    config = example("qwen2_5_omni_talker")
    text = config["model"]["config"]["thinker_config"]["text_config"]
    text |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 16}
    config["model"]["config"]["thinker_config"]["vision_config"]["out_hidden_size"] = heads * 16
    config["model"]["config"]["thinker_config"]["audio_config"]["output_dim"] = heads * 16
    config["model"]["config"]["talker_config"]["embedding_size"] = heads * 16
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))

    small = shrink(load_config(str(tmp_path / "train.yaml"), []), world=2, precision="fp32")  # runs the probe
    fields = build_model(small.model, "fp32", "meta").config.to_dict()
    small_width = fields["thinker_config"]["text_config"]["hidden_size"]
    assert small_width == heads * 16
    assert fields["talker_config"]["embedding_size"] == small_width
    assert fields["thinker_config"]["vision_config"]["out_hidden_size"] == small_width
