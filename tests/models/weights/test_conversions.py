"""Published weights that loading stacks, concatenates, splits, transposes or permutes: each rank gets its shard of what
one process loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import run_on_ranks
from safetensors.torch import load_file, save_file
from tiny import model_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, Interleave, Split, Transpose, WeightConverter
from weights import load, whole

from omnizoo.config.errors import UserError
from omnizoo.models.check_config_fields import EXPERTS
from omnizoo.models.hf_private import Loaded, load_files
from omnizoo.models.small_config import Shrinking, shrink_config
from omnizoo.parallel.process import Process, process_group

# Together, these families stack (experts), concatenate along every dim that some layout splits (gates, convolutions),
# split and permute, and transpose. One folder is as transformers saves it, one as it was first published.
FAMILIES = ("kimi_linear", "kimi_k25", "qwen3_vl_moe", "qwen3_vl_moe_turned")
LAYOUTS = (("--parallel.ep", "1"), ("--parallel.ep", "4"), ("--parallel.ep", "2"))  # the last: 2 ranks share an expert
MLP, ATTENTION = "model.layers.0.mlp.", "model.layers.0.self_attn."


def kind_of(config: Any) -> Any:
    return AutoModelForMultimodalLM if config.sub_configs else AutoModelForCausalLM


def publish(name: str, folder: Path) -> None:
    family = name.removesuffix("_turned")
    config = AutoConfig.for_model(**shrink_config(AutoConfig.for_model(family), Shrinking(vocabulary=64)))
    text = config.get_text_config()
    for key in EXPERTS:
        if hasattr(text, key):
            setattr(text, key, 8)
    torch.manual_seed(0)
    kind_of(config).from_config(config).save_pretrained(folder)
    if name != family:
        weights = load_file(folder / "model.safetensors")
        turned = {key: tensor.transpose(1, 2).contiguous() for key, tensor in weights.items() if ".experts." in key}
        save_file(weights | turned, folder / "model.safetensors", {"format": "pt"})
    model = {"path": str(folder), "text_only": bool(config.sub_configs)}
    rest = {"data": {"sources": [{"path": "rows.jsonl"}]}, "train": {"steps": 1, "packs_per_step": 4}}
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": model, "log": {"dir": str(folder / "run")}} | rest))


def other_operations() -> list[WeightConverter]:
    """Return the other conversions of transformers, which no family of the zoo uses, for weights of a Llama."""
    halves = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    heads = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    return [
        WeightConverter("mlp.w13.weight", halves, [Interleave(0), Chunk(0)]),
        WeightConverter("self_attn.qkv.weight", heads, [Split(0)]),
        WeightConverter("self_attn.turned.weight", "self_attn.o_proj.weight", [Transpose(0, 1)]),
        WeightConverter(["embed.old", "embed.new"], "embed_tokens.weight", [Concatenate(0)]),
    ]


def as_others_publish(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a one-layer Llama before `other_operations`."""
    rest = dict(weights)
    gate, up = (rest.pop(f"{MLP}{name}_proj.weight") for name in ("gate", "up"))
    heads = [rest.pop(f"{ATTENTION}{name}_proj.weight") for name in "qkv"]
    turned, table = rest.pop(f"{ATTENTION}o_proj.weight").T, rest.pop("model.embed_tokens.weight")
    rest |= {f"{MLP}w13.weight": torch.stack([gate, up], 1).flatten(0, 1), f"{ATTENTION}qkv.weight": torch.cat(heads)}
    rest |= {f"{ATTENTION}turned.weight": turned, "model.embed.old": table[:300], "model.embed.new": table[300:]}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in rest.items()}


def tiny_llama(device: str) -> Any:
    with torch.device(device), torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**model_config("llama") | {"num_hidden_layers": 1})
        return AutoModelForCausalLM.from_config(config)


def check_all(process: Process, folder: str) -> None:
    wrong: list[tuple[str, ...]] = []
    for own in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
        given = dict(kind_of(AutoConfig.from_pretrained(own)).from_pretrained(own).named_parameters())
        for layout in LAYOUTS if "experts" in str(given.keys()) else LAYOUTS[:1]:
            found = load(process, own / "run.yaml", *layout)
            assert found.keys() == given.keys()
            wrong += [(own.name, *layout, name) for name in found if not torch.equal(found[name], given[name])]
    assert not wrong, wrong
    model, given = tiny_llama("meta"), tiny_llama("cpu").state_dict()
    fully_shard(model, mesh=init_device_mesh("cpu", (process.world_size,)))
    loaded = load_files(model, [Path(folder) / "llama.safetensors"], other_operations(), torch.device("cpu"))
    assert loaded == Loaded(set(), set(), {})
    found = whole(dict(model.named_parameters()))
    assert [name for name in found if not torch.equal(found[name], given[name])] == []


@pytest.mark.slow
def test_converted_shards_match_one_process(tmp_path: Path) -> None:
    for name in FAMILIES:
        publish(name, tmp_path / name)
    save_file(as_others_publish(tiny_llama("cpu").state_dict()), tmp_path / "llama.safetensors")
    result = run_on_ranks(check_all, 4, str(tmp_path))
    assert result.code == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_missing_or_misshapen_expert_raises_one_line(tmp_path: Path) -> None:
    publish("kimi_linear", tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    others = {key: tensor for key, tensor in weights.items() if key != name}
    for wrong in ({f"{name}s": weights[name]}, {name: weights[name][:1].clone()}):
        save_file(others | wrong, file, {"format": "pt"})
        with process_group() as process, pytest.raises(UserError) as error:
            load(process, tmp_path / "model/run.yaml")
        assert "cannot be converted to model.layers.1.mlp.experts.gate_up_proj" in str(error.value)
        assert "\n" not in str(error.value)


def test_list_of_conversion_operations_is_complete() -> None:
    """A new operation needs a review: can a rank convert its shard of the published weights separately?"""
    mapping = _build_checkpoint_conversion_mapping()
    converters = [each for every in mapping.values() for each in every if isinstance(each, WeightConverter)]
    assert {type(operation).__name__ for each in converters for operation in each.operations} == {
        *("MergeModulelist", "Concatenate", "Chunk", "Split", "Interleave", "Transpose", "PermuteForRope"),
        "ErnieFuseAndSplitTextVisionExperts",
    }
