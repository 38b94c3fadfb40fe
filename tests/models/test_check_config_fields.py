"""Fields of an inline model.config: fields of the family are accepted, others raise an error with their name."""

from typing import Any

import pytest
from tiny import FAMILIES, model_config
from transformers import CONFIG_MAPPING

from omnizoo.config.errors import UserError
from omnizoo.models.check_config_fields import config_of, unknown_fields
from omnizoo.parallel.layout import divisors
from omnizoo.parallel.rendezvous import place_in_world


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_moe", "deepseek_v3", "gpt2", "qwen3_vl", "whisper", "encodec"])
def test_config_accepts_all_fields_that_family_saves(family: str) -> None:
    given = model_config(family) if family in FAMILIES else {"model_type": family}
    fields = config_of(given, "model.config").to_dict()
    assert not list(unknown_fields(CONFIG_MAPPING[family], fields))
    assert config_of(fields, "model.config").to_dict() == fields


@pytest.mark.parametrize(
    "older", [{"rope_theta": 5e5}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"torch_dtype": "float32"}]
)
def test_config_accepts_old_field_names(older: dict[str, Any]) -> None:
    before = {name: dict(value) if isinstance(value, dict) else value for name, value in older.items()}
    config_of(model_config("llama") | older, "model.config")
    assert older == before, "the user's mapping must not change"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_sise": 4}, r"^model\.config\.hidden_sise: .*`llama`.* hidden_size"),
        ({"num_hidden_layers": 10**9}, r"^model\.config\.num_hidden_layers: 1000000000"),
        ({"num_key_value_heads": 3}, r"^model\.config\.num_key_value_heads: 3 .*num_attention_heads 4"),
        ({"rope_theta": -1}, r"^model\.config\.rope_theta: -1"),
        ({"head_dim": 7}, "even rotary dimension.*head_dim"),
        ({"hidden_size": "x"}, "hidden_size.*expected int, got str"),
        ({"rms_norm_eps": float("nan")}, r"^model\.config\.rms_norm_eps: nan"),
        ({"model_type": "lama"}, r"^model\.config\.model_type: 'lama' .* llama"),
    ],
)
def test_invalid_config_field_is_named_in_one_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config_of(model_config("llama") | changed, "model.config")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK"),
        ({"SLURM_NTASKS": "many", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS"),
    ],
)
def test_invalid_rank_environment_raises(place: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        place_in_world()


def test_divisors_are_complete_and_sorted() -> None:
    for n in range(1, 200):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
