"""Private names of transformers and torch, and undocumented behavior that OmniZoo relies on, are as expected.

A failure here shows what to check after an upgrade.
"""

import inspect
import sys
from argparse import Namespace
from importlib import import_module
from importlib.metadata import requires, version
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.version import Version
from tiny import model_config
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig, load_state_dict
from transformers.models.lfm2 import modeling_lfm2 as lfm2
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

import omnizoo.models.interfaces.attention  # noqa: F401 - registers ours
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.versions import TESTED, check_signatures, explain_import
from omnizoo.models import hf_private
from omnizoo.models.interfaces.recurrent import REPLACEMENTS
from omnizoo.ops.precision import KeepFloat64
from omnizoo.ops.torch_private import without_function_modes


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def tiny(family: str) -> PreTrainedModel:
    fields = model_config(family)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))


def test_installed_versions_are_tested_versions() -> None:
    """The requirements of the package allow the same versions."""
    needed = {r.name: r.specifier for r in map(Requirement, requires("omnizoo") or []) if r.marker is None}
    for package, (first, last) in TESTED.items():
        installed = Version(version(package).partition("+")[0])
        assert Version(first) <= installed <= Version(last), f"{package} {installed}"
        assert needed[package].contains(first)
        assert needed[package].contains(last)
        later = f"{Version(last).major}.{Version(last).minor + 1}.0"
        assert not needed[package].contains(later), f"{package} {later} was not tested"


def test_changed_private_name_raises_with_version_to_install() -> None:
    hf_private.check_names()
    with pytest.raises(UserError, match=r"^torch: load .*\(a, b\).*pip install 'torch==") as caught:
        check_signatures("torch", {"load": (lambda a, b: None, ("a", "c"))})
    assert "\n" not in str(caught.value)
    gone = ImportError("cannot import name 'x' from 'transformers.y'", name="transformers.y")
    assert "transformers" in (explain_import(gone) or "")
    assert explain_import(ImportError("no", name="a_package_of_ones_own")) is None


def test_import_error_of_tested_package_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "omnizoo.cli.recipes", None)  # as if it could not be imported
    with pytest.raises(ImportError):
        main(["recipes"])  # an import error in OmniZoo's own files is a bug, not a version mismatch

    def fails(args: Namespace) -> int:
        raise ImportError("cannot import name 'x' from 'transformers'", name="transformers")

    monkeypatch.setitem(sys.modules, "omnizoo.cli.recipes", SimpleNamespace(add_arguments=str, run=fails))
    assert main(["recipes"]) == 2
    error = capsys.readouterr().err
    assert "5.21.1 to 5.23.0" in error
    assert error.count("\n") == 1


def test_blocks_are_declared_by_class_name() -> None:
    assert set(tiny("llama")._no_split_modules) == {"LlamaDecoderLayer"}
    assert hf_private.block_class_names(tiny("qwen3")) == {"Qwen3DecoderLayer"}


def test_models_declare_attention_interface_and_state() -> None:
    assert isinstance(PreTrainedModel._supports_attention_backend, bool)
    assert isinstance(PreTrainedModel._is_stateful, bool)
    assert hf_private.uses_attention_interface(tiny("llama"))
    assert not hf_private.carries_state(tiny("llama"))
    assert transformers.MambaForCausalLM._is_stateful
    assert not transformers.BloomForCausalLM._supports_attention_backend
    # Hybrid models use the interface without declaring it.
    assert not transformers.Qwen3NextForCausalLM._supports_attention_backend
    hybrid = AutoConfig.for_model("qwen3_next", num_hidden_layers=4, hidden_size=64, num_experts=4)
    with torch.device("meta"):
        assert hf_private.uses_attention_interface(AutoModelForCausalLM.from_config(hybrid))


def test_initialization_rules_run_on_meta_only_if_requested() -> None:
    assert parameters(PreTrainedModel.init_weights) == parameters(PreTrainedModel.initialize_weights) == ["self"]
    applied = []
    with patch.object(transformers.LlamaPreTrainedModel, "_init_weights", lambda self, module: applied.append(module)):
        tiny("llama")
        assert not applied  # transformers skips them on meta; if this fails, `rules_on_meta` is no longer needed
        with hf_private.rules_on_meta():
            model = tiny("llama")
        assert set(applied) == set(model.modules())


def test_weight_loader_has_expected_signature() -> None:
    assert parameters(convert_and_load_state_dict_in_model)[:3] == ["model", "state_dict", "load_config"]
    assert {"device_map", "weight_mapping", "ignore_mismatched_sizes"} <= set(parameters(LoadStateDictConfig))
    assert parameters(PreTrainedModel._adjust_missing_and_unexpected_keys) == ["self", "loading_info"]
    assert parameters(get_model_conversion_mapping)[0] == "model"
    assert callable(load_state_dict)


def test_tied_weights_are_listed_as_target_and_source() -> None:
    assert tiny("qwen3").all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tiny("llama").all_tied_weights_keys == {}


def test_attention_functions_can_be_registered() -> None:
    assert "packed" in AttentionInterface.valid_keys(AttentionInterface())


def test_function_modes_can_be_disabled() -> None:
    ones = torch.ones(2)
    with KeepFloat64():
        assert ones.float().dtype == torch.float64
        with without_function_modes():
            assert ones.float().dtype == torch.float32


def test_fsdp_units_have_expected_switches() -> None:
    for name, argument in {
        "set_gradient_divide_factor": "factor",
        "set_force_sum_reduction_for_comms": "enable",
        "set_is_last_backward": "is_last_backward",
        "set_requires_all_reduce": "requires_all_reduce",
        "set_requires_gradient_sync": "requires_gradient_sync",
        "set_reshard_after_backward": "reshard_after_backward",
        "_set_unshard_async_op": "async_op",
    }.items():
        assert parameters(getattr(FSDPModule, name))[:2] == ["self", argument]


def test_adamw_collects_kernel_lists_in_one_method() -> None:
    lists = ["params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    assert parameters(torch.optim.AdamW._init_group) == ["self", "group", *lists]
    assert "self._init_group(" in inspect.getsource(torch.optim.Adam.step)


def test_recurrent_layers_call_rules_by_expected_names() -> None:
    """`models/interfaces/recurrent.py` finds the rules by the names that the forward of a layer calls."""
    scan = {"causal_conv1d_fn", "mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan"}
    for family, name, rules in (
        ("qwen3_next", "Qwen3NextGatedDeltaNet", {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}),
        ("qwen3_5", "Qwen3_5GatedDeltaNet", {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"}),
        ("kimi_linear", "KimiLinearDeltaAttention", {"causal_conv1d_fn", "chunk_kimi_delta_attention"}),
        ("lfm2", "Lfm2ShortConv", {"causal_conv1d_fn"}),
        ("nemotron_h", "NemotronHMamba2Mixer", scan),
        ("mamba2", "Mamba2Mixer", scan),
    ):
        home = import_module(f"transformers.models.{family}.modeling_{family}")
        code = inspect.unwrap(getattr(home, name).forward).__code__
        assert rules <= set(code.co_names)
        assert rules == set(REPLACEMENTS) & set(vars(home))
    conv, rule = lfm2.causal_conv1d_fn, qwen3_5.torch_chunk_gated_delta_rule
    assert parameters(conv)[:4] == ["hidden_states", "weight", "bias", "activation"]
    assert {"initial_state", "use_qk_l2norm_in_kernel"} <= set(parameters(rule))
    assert parameters(rule)[:5] == ["query", "key", "value", "g", "beta"]
    assert parameters(mamba2.mamba2_chunk_scan)[:6] == ["hidden_states", "dt", "A", "B", "C", "chunk_size"]
    assert {"D", "dt_bias", "dt_softplus", "dt_limit"} <= set(parameters(mamba2.mamba2_chunk_scan))


def test_compiler_counters_have_expected_names() -> None:
    from torch._dynamo.utils import CompilationMetrics
    from torch._inductor.compile_fx import compile_fx

    assert {"model_", "example_inputs_", "config_patches"} <= {*parameters(compile_fx)}
    assert {"fail_type", "fail_reason"} <= {*CompilationMetrics.__dataclass_fields__}
    assert not torch._dynamo.config.nested_graph_breaks  # the numbers of graphs in docs/how-to/speed.md
    counters["frames"].clear()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert counters["frames"] == {"total": 1, "ok": 1}
