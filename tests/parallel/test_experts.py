"""Experts: our math against Hugging Face's own loop, and four real ranks against one process."""

from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from expert_ranks import start_four
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from omnizoo.config.errors import UserError
from omnizoo.config.sections.parallel import ParallelSection
from omnizoo.models.hf_private import conversion_mapping, expert_modules, load_files
from omnizoo.models.interfaces.experts import DISPATCHED, use_dispatched
from omnizoo.ops.experts import (
    Experts,
    by_expert,
    combine,
    gather,
    grouped_matmul,
    matmul_per_expert,
    multiply_rows,
    run_experts,
    sort_by_expert,
)
from omnizoo.ops.precision import keep_precision
from omnizoo.ops.torch_private import Recomputation
from omnizoo.parallel.collective_counter import CollectiveCounter
from omnizoo.parallel.experts import Dispatch, _dim_to_split, check_experts, shard_experts
from omnizoo.parallel.fsdp.fill import allocate, fill
from omnizoo.parallel.fsdp.shard import prefetch
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.mesh import Mesh, build_mesh
from omnizoo.parallel.process import Process
from omnizoo.parallelize.recompute import gather_aside, recompute

EXPERTS, CHOICES, WIDTH = 8, 3, 16
FAMILIES = {  # between them: fused gates, interleaved gates, biases, transposed weights, shared experts
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 12},
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": 12},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 12,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def tiny(family: str, layers: int = 1) -> PreTrainedModel:
    sizes = {"hidden_size": WIDTH, "num_experts_per_tok": CHOICES, "vocab_size": 32, "num_hidden_layers": layers}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(family, **(sizes | attention | {"intermediate_size": 24} | FAMILIES[family]))
    return AutoModelForCausalLM.from_config(config)


def draw(module: nn.Module) -> None:
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


def experts_of(family: str, dtype: torch.dtype, implementation: str = DISPATCHED) -> nn.Module:
    """The experts of one layer, with drawn weights."""
    sizes = {"moe_intermediate_size": 12}
    if family == "muse_spark":  # a norm behind the experts
        module = MuseSparkExperts(MuseSparkTextConfig(num_local_experts=EXPERTS, moe_hidden_size=WIDTH, **sizes))
    elif family == "nemotron_h":  # no gate
        module = NemotronHExperts(NemotronHConfig(n_routed_experts=EXPERTS, hidden_size=WIDTH, **sizes))
    else:
        (module,) = expert_modules(tiny(family)).values()
    module.config._experts_implementation = implementation
    draw(module)
    return module.to(dtype)


def routed(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, chosen experts, their weights, and the gradient of what comes out."""
    generator = torch.Generator().manual_seed(tokens)
    hidden, grad = torch.randn(2, tokens, WIDTH, generator=generator, dtype=dtype)
    weights, index = torch.rand(tokens, EXPERTS, generator=generator, dtype=dtype).topk(CHOICES)
    return hidden, index, weights, grad


def run(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Output and every gradient, by name."""
    hidden, index, weights, grad = inputs
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    out = module(hidden, index, weights)
    out.backward(grad)
    assert hidden.grad is not None
    assert weights.grad is not None
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad} | grads


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative error; 0 for tensors that are both zero."""
    assert found.keys() == wanted.keys()
    errors = [(found[k] - wanted[k]).norm() / wanted[k].norm().clamp(min=1e-30) for k in wanted if wanted[k].numel()]
    return max(map(float, errors), default=0.0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, "muse_spark", "nemotron_h"])
def test_output_and_gradients_match_transformers_loop(family: str, dtype: torch.dtype) -> None:
    inputs = routed(40, dtype)
    with keep_precision("fp64" if dtype is torch.float64 else "fp32"):
        wanted = run(experts_of(family, dtype, "eager"), inputs)
        found = run(experts_of(family, dtype), inputs)
    assert worst(found, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("family", FAMILIES)
def test_model_gradients_match_transformers_experts(family: str) -> None:
    tokens = torch.randint(0, 32, (1, 24), generator=torch.Generator().manual_seed(0))
    grads = []
    for ours in (False, True):
        model = tiny(family)
        draw(model)
        if ours:
            use_dispatched(model)
        else:
            model.set_experts_implementation("eager")
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert worst(grads[1], grads[0]) < 1e-5


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (15, torch.float32), (16, torch.float64)])
def test_grouped_matmul_matches_reference_with_zeros_for_idle_experts(
    width: int, dtype: torch.dtype, counts: list[int], transposed: bool
) -> None:
    torch.manual_seed(0)
    rows, grad = torch.randn(sum(counts), width, dtype=dtype), torch.randn(sum(counts), 24, dtype=dtype)
    shape = (4, 24, width) if transposed else (4, width, 24)
    weights = torch.randn(shape, dtype=dtype)
    results = []
    for kernel in (grouped_matmul, matmul_per_expert):
        r, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        out = kernel(r, torch.tensor(counts), w.transpose(1, 2) if transposed else w)
        out.backward(grad)
        assert w.grad is not None
        results.append({"out": out.detach(), "rows": r.grad, "weights": w.grad})
        for expert, count in enumerate(counts):
            assert count or not w.grad[expert].any()
    assert worst(results[0], results[1]) < TOLERANCE[dtype]


def test_biases_are_added_to_rows_of_their_expert() -> None:
    rows, counts = torch.randn(5, 4), torch.tensor([2, 0, 3])
    up, down, up_bias, down_bias = torch.randn(3, 4, 6), torch.randn(3, 6, 4), torch.randn(3, 6), torch.randn(3, 4)
    weights, experts = torch.rand(5, 1), Experts(up, down, up_bias, down_bias, torch.relu)
    out, weighed = run_experts(rows, counts, experts), run_experts(rows, counts, experts, weights)
    for row, expert, found in zip(rows, [0, 0, 2, 2, 2], out, strict=True):
        wanted = torch.relu(row @ up[expert] + up_bias[expert]) @ down[expert] + down_bias[expert]
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(weighed, out * weights)


def test_sorted_pairs_keep_token_order_and_combine_inverts_sorting() -> None:
    index = torch.tensor([[2, 0], [0, 1], [2, 0]])
    pairs = sort_by_expert(index, 4)
    assert pairs.order.tolist() == [1, 2, 5, 3, 0, 4]
    assert pairs.counts.tolist() == [3, 1, 2, 0]
    hidden = torch.randn(3, 5)
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    torch.testing.assert_close(combine(multiply_rows(gather(hidden, pairs), by_expert(weights, pairs)), pairs), hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_choices_are_summed_in_order_in_fp32(dtype: torch.dtype) -> None:
    index = torch.rand(50, 9).argsort(1)[:, :6]
    pairs = sort_by_expert(index, 9)
    rows = torch.randn(300, 24).to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    one_by_one = torch.zeros(50, 24, dtype=exact)
    for places in pairs.sorted_position.view(50, 6).unbind(1):
        one_by_one += rows[places]
    found = combine(rows, pairs).to(exact)
    if dtype == exact:
        assert torch.equal(found, one_by_one)
    else:  # rounded once, half of the last digit at most; which way from the middle is up to the kernel
        assert ((found - one_by_one).abs() <= 2.0**-8 * 2 ** one_by_one.abs().log2().floor() * 1.001).all()
    none = sort_by_expert(index[:0], 9)
    assert combine(rows[:0], none).shape == (0, 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_routing_weights_are_summed_in_fp32(dtype: torch.dtype) -> None:
    rows = torch.randn(40, 64).to(dtype).requires_grad_()
    weights, grad = (
        torch.rand(40, 1, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_(),
        torch.randn(40, 64),
    )
    out = multiply_rows(rows, weights)
    assert out.dtype == dtype
    out.backward(grad.to(dtype))
    wanted = (rows.detach().double() * grad.to(dtype).double()).sum(1, keepdim=True)
    torch.testing.assert_close(weights.grad.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, (rows.double() * weights.double()).to(dtype))


def test_ep_that_does_not_divide_experts_raises_with_nearest_size() -> None:
    check_experts(Layout(dp_shard=8, ep=4), 12)
    with pytest.raises(UserError, match=r"^parallel\.ep: 8 .* 12 experts\. Use 4,"):
        check_experts(Layout(dp_shard=8, ep=8), 12)


@pytest.mark.parametrize(
    ("shape", "layout", "dim"),
    [
        ([8, 24, 16], Layout(dp_shard=4), 0),
        ([6, 24, 16], Layout(dp_shard=4), 2),
        ([6, 25, 15], Layout(dp_shard=4), 0),
        ([8, 24, 16], Layout(dp_shard=4, ep=2), 2),
        ([8, 24], Layout(dp_shard=4, ep=2), 1),
    ],
)
def test_experts_are_split_by_expert_if_possible_else_last_dim(shape, layout: Layout, dim: int) -> None:
    assert _dim_to_split("gate_up_proj", shape, layout) == dim


def test_experts_that_cannot_be_split_evenly_raise() -> None:
    with pytest.raises(UserError, match=r"^parallel\.ep: .* 2 ranks.*`down_proj` \[8, 16, 15\]"):
        _dim_to_split("down_proj", [8, 16, 15], Layout(dp_shard=4, ep=2))


# Four ranks. They start once and go through all cases; each test below reads one result.

LAYOUTS = {
    "ep4": ParallelSection(ep=4),
    "ep2 x ep_shard2": ParallelSection(ep=2),
    "ep1": ParallelSection(ep=1),
    "HSDP 2 x ep2": ParallelSection(dp_replicate=2, ep=2),
    "HSDP 2 x ep1": ParallelSection(dp_replicate=2, ep=1),
    "HSDP 4": ParallelSection(dp_replicate=4),
}
SPLITS = {"uneven": [7, 1, 12, 4], "one rank without tokens": [9, 0, 10, 5], "three ranks without": [0, 0, 24, 0]}
CASES = [(family, dtype) for family in ("qwen3_moe", "gpt_oss") for dtype in TOLERANCE] + [
    ("muse_spark", torch.float32)
]
ROUTINGS = ["own choices", "all to one expert"]


def sharded(family: str, dtype: torch.dtype, mesh: Mesh) -> nn.Module:
    """`experts_of` the same family, made on meta, sharded, then filled."""
    whole = experts_of(family, dtype)
    module = deepcopy(whole).to("meta")
    shard_experts([module], mesh, True, MixedPrecisionPolicy())
    allocate(module, torch.device("cpu"))
    fill(module, whole.named_parameters())
    module.to("cpu")
    for name, wanted in whole.named_parameters():
        assert torch.equal(module.get_parameter(name).full_tensor(), wanted), f"{name} differs after filling"
    if mesh.layout.ep > 1:
        module.dispatch = Dispatch(mesh.group("ep"), EXPERTS)
    return module


def part_of(inputs: tuple[torch.Tensor, ...], split: list[int], rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.split(split)[rank] for tensor in inputs)


def whole(results: dict[str, torch.Tensor], split: list[int]) -> dict[str, torch.Tensor]:
    """Gradients of parameters put together from their shards, of inputs from the ranks."""

    def joined(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
        parts: list[torch.Tensor] = [tensor] * 4
        dist.all_gather_object(parts, tensor)
        assert [len(part) for part in parts] == split
        return torch.cat(parts)

    return {name: joined(tensor) for name, tensor in results.items()}


def gradients(mesh: Mesh, rank: int) -> dict[str, float]:
    """Worst error of each case, in units of what is tolerated."""
    results = {}
    for family, dtype in CASES:
        one, module = experts_of(family, dtype), sharded(family, dtype, mesh)
        for routing in ROUTINGS:
            hidden, index, weights, grad = routed(24, dtype)
            if routing == "all to one expert":
                index, weights = torch.full_like(index[:, :1], 5), weights[:, :1]
            inputs = hidden, index, weights, grad
            one.zero_grad()
            wanted = run(one, inputs)
            for name, split in SPLITS.items():
                module.zero_grad()
                found = whole(run(module, part_of(inputs, split, rank)), split)
                results[f"{family} {dtype}, {routing}, {name}"] = worst(found, wanted) / TOLERANCE[dtype]
    return results


def traffic(mesh: Mesh, rank: int) -> dict[str, float]:
    """Collectives of one layer, forward and backward, and the bytes of rows that all ranks put in."""
    module = sharded("qwen3_moe", torch.float32, mesh)
    inputs = part_of(routed(24, torch.float32), SPLITS["uneven"], rank)
    with CollectiveCounter() as counter:
        run(module, inputs)
    rows = inputs[0].numel() * CHOICES * 4
    sent = counter.bytes["all-to-all"] - 8 * EXPERTS
    total = [(0, 0)] * 4
    dist.all_gather_object(total, (sent, rows))
    return {
        "calls": counter.calls["all-to-all"],
        "bytes over rows": sum(s for s, _ in total) / sum(r for _, r in total),
        "other collectives": sum(counter.calls.values()) - counter.calls["all-to-all"],
    }


class Block(nn.Module):
    def __init__(self, experts: nn.Module, last: bool) -> None:
        super().__init__()
        self.experts, self.last = experts, last

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = hidden + self.experts(hidden.tanh(), index, weights)
        return out if self.last else out.tanh()


def recomputed(mesh: Mesh, rank: int, last: bool) -> dict[str, dict[str, float]]:
    """By mode: all-to-alls of forward and backward, waits of the host, and the error against no recomputation."""
    found: dict[str, dict[str, float]] = {}
    hidden, index, weights, grad = part_of(routed(24, torch.float32), SPLITS["one rank without tokens"], rank)
    wanted: dict[str, torch.Tensor] = {}
    for mode in ("none", "full", "selective"):
        recomputation, splits = Recomputation(), []

        class Counting(Dispatch):
            def split(self, *args: torch.Tensor, splits: list[int] = splits) -> tuple[list[int], list[int]]:
                splits.append(1)
                return super().split(*args)

        block = Block(sharded("qwen3_moe", torch.float32, mesh), last)
        block.experts.dispatch = Counting(mesh.group("ep"), EXPERTS, recomputation)
        gather_aside(block.experts, recomputation)
        recompute(block, mode, "fp32", recomputation)
        h, w = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        with CollectiveCounter() as forward:
            out = block(h, index, w)
        with CollectiveCounter() as backward:
            out.backward(grad)
        results = {"out": out.detach(), "hidden": h.grad, "weights": w.grad}
        results |= {name: p.grad.to_local() for name, p in block.named_parameters()}
        wanted = wanted or results
        found[mode] = {
            "forward": forward.calls["all-to-all"],
            "backward": backward.calls["all-to-all"],
            "splits": len(splits),
            "error": worst(results, wanted),
        }
    return found


def own_group(mesh: Mesh) -> bool:
    """Whether no unit of FSDP sends along the group that tokens travel to their experts by."""
    others = [mesh.dense.get_group("shard"), mesh.dense.get_group("replicate"), mesh.experts.get_group("ep_shard")]
    return all(mesh.group("ep") is not other for other in [*others, mesh.world_group])


def loaded(mesh: Mesh, folder: Path) -> float:
    """Published per-expert files into a sharded model by transformers' own loader: 1.0 if every tensor is bit-equal."""
    saved = AutoModelForCausalLM.from_pretrained(folder)
    with torch.device("meta"):
        model = tiny("qwen3_moe", layers=2)
    mapping = conversion_mapping(model)
    shard_experts(expert_modules(model).values(), mesh, True, MixedPrecisionPolicy())
    for block in model.model.layers:
        fully_shard(block, mesh=mesh.fsdp)
    fully_shard(model, mesh=mesh.fsdp)
    result = load_files(model, [folder / "model.safetensors"], mapping, torch.device("cpu"))
    assert not result.missing
    for name, wanted in saved.named_parameters():
        found = model.get_parameter(name)
        assert isinstance(found, DTensor)
        if not torch.equal(found.full_tensor(), wanted):
            return 0.0
    return 1.0


def gathered_ahead(mesh: Mesh) -> dict[str, int]:
    """All-gathers before the first block's attention begins in forward, before the last one's ends in backward, and of
    the whole pass."""
    model = tiny("qwen3_moe", layers=3)
    use_dispatched(model)
    draw(model)
    experts = list(expert_modules(model).values())
    shard_experts(experts, mesh, True, MixedPrecisionPolicy())
    for module in experts:
        module.dispatch = Dispatch(mesh.group("ep"), EXPERTS)
    blocks = list(model.model.layers)
    for block in blocks:
        fully_shard(block, mesh=mesh.fsdp)
    fully_shard(model, mesh=mesh.fsdp, reshard_after_forward=False)
    prefetch(list(zip(blocks, experts, strict=True)))
    found: dict[str, int] = {}
    with CollectiveCounter() as counter:

        def note(name: str) -> None:
            found.setdefault(name, counter.calls["all-gather"])

        blocks[0].self_attn.register_forward_pre_hook(lambda *_: note("first in forward"))
        blocks[2].self_attn.register_full_backward_hook(lambda *_: note("last in backward"))
        tokens = torch.arange(8)[None]
        loss = model(tokens, labels=tokens, use_cache=False).loss
        note("forward")
        loss.backward()
        note("both")
    return found


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    train = SimpleNamespace(packs_per_step=4, samples_per_step=None, micro_batch=1)
    results: dict[str, dict[str, object]] = {}
    for name, parallel in LAYOUTS.items():
        config = SimpleNamespace(parallel=parallel, train=train)
        mesh = build_mesh(config, Process(rank, 4, rank, torch.device("cpu")))
        results[name] = {
            "gradients": gradients(mesh, rank),
            "traffic": traffic(mesh, rank),
            "loaded": loaded(mesh, folder / "model"),
        }
        if mesh.layout.ep > 1:
            results[name] |= {"own group": own_group(mesh), "gathered": gathered_ahead(mesh)}
            results[name] |= {f"recomputed, last: {last}": recomputed(mesh, rank, last) for last in (True, False)}
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(2)
    tiny("qwen3_moe", layers=2).save_pretrained(folder / "model")
    start_four(rank_main, folder)
    results: dict[str, dict[str, dict[str, float]]] = torch.load(folder / "results.pt")
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_match_one_process(on_four_ranks, layout: str) -> None:
    errors = on_four_ranks[layout]["gradients"]
    assert len(errors) == len(CASES) * len(ROUTINGS) * len(SPLITS)
    assert max(errors.values()) < 1, {case: error for case, error in errors.items() if error >= 1}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_files_load_bitwise_into_sharded_experts(on_four_ranks, layout: str) -> None:
    assert on_four_ranks[layout]["loaded"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "all_to_alls", "other"),
    [("ep4", 7, 0), ("ep2 x ep_shard2", 7, 3), ("ep1", 0, 3), ("HSDP 2 x ep2", 7, 1), ("HSDP 2 x ep1", 0, 4)],
)
def test_moe_layer_sends_rows_twice_per_pass(on_four_ranks, layout: str, all_to_alls: int, other: int) -> None:
    """Seven: the counts, four times rows, and their weights there and back. Others: FSDP2 gathers (twice) and reduces
    over ep_shard and replicas."""
    traffic = on_four_ranks[layout]["traffic"]
    assert traffic["calls"] == all_to_alls
    assert traffic["other collectives"] == other
    if all_to_alls:
        assert traffic["bytes over rows"] == 4.0 + 2 / WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name, parallel in LAYOUTS.items() if parallel.ep > 1])
@pytest.mark.parametrize(("last", "again"), [(True, 2), (False, 3)])
def test_recomputation_has_no_host_sync_and_skips_returning_rows(
    on_four_ranks, layout: str, last: bool, again: int
) -> None:
    """Forward: counts, rows, weights, results. Backward: gradients of the last three; `full` sends two of them again,
    results too if the block goes on after its experts; `selective` none."""
    found = on_four_ranks[layout][f"recomputed, last: {last}"]
    assert {mode: (each["forward"], each["backward"]) for mode, each in found.items()} == {
        "none": (4, 3),
        "full": (4, 3 + again),
        "selective": (4, 3),
    }
    assert [each["splits"] for each in found.values()] == [1, 1, 1]
    assert [each["error"] for each in found.values()] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name, parallel in LAYOUTS.items() if parallel.ep > 1])
def test_expert_all_to_alls_use_a_separate_group(on_four_ranks, layout: str) -> None:
    assert on_four_ranks[layout]["own group"]


@pytest.mark.slow
def test_next_block_and_its_experts_are_prefetched(on_four_ranks) -> None:
    """Units: root, three blocks, three times experts. Everything but the root is gathered twice, once per pass."""
    found = on_four_ranks["ep2 x ep_shard2"]["gathered"]
    assert found == {"first in forward": 5, "forward": 7, "last in backward": 11, "both": 13}
