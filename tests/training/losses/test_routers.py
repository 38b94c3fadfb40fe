"""Router losses against Hugging Face's own function pack by pack, and the same when four ranks share the packs."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expert_ranks import start_four
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from omnizoo.models.interfaces.routers import RouterRecord, RouterRecorder, correction_bias
from omnizoo.training.losses.routers import balance_sum, router_z_sum
from omnizoo.training.router_stats import RouterStats

TOKENS, EXPERTS, CHOICES, LAYERS, PACKS = 37, 8, 3, 2, 3
SPLIT = [12, 0, 20, 5]  # tokens of each of four ranks: packs cross their borders, and one has none


def records_of(logits: torch.Tensor, tokens: slice = slice(None)) -> list[RouterRecord]:
    """What routers with `logits [layers, T, E]` leave behind."""
    layers = enumerate(logits[:, tokens])
    return [RouterRecord(f"layer{i}", layer, layer.topk(CHOICES)[1]) for i, layer in layers]


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """logits `[layers, T, E]` and the pack of each token; packs of 10, 5 and 22 tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(LAYERS, TOKENS, EXPERTS, generator=generator, dtype=dtype) * 2
    return logits, torch.tensor([0] * 10 + [1] * 5 + [2] * 22)


def sum_over(group: dist.ProcessGroup | None) -> Callable[[torch.Tensor], torch.Tensor]:
    def add_up(load: torch.Tensor) -> torch.Tensor:
        if group is not None:
            dist.all_reduce(load, group=group)
        return load

    return add_up


def losses_and_gradients(
    logits: torch.Tensor, pack_of_token: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.clone().requires_grad_()
    records = records_of(logits)
    balance = balance_sum(records, pack_of_token, PACKS, sum_over(group))
    z = router_z_sum(records, pack_of_token)
    (2.0 * balance + 0.5 * z).backward()
    assert logits.grad is not None
    return balance.detach(), z.detach(), logits.grad


def test_balance_sum_matches_transformers_for_each_pack() -> None:
    logits, packs = drawn(torch.float32)
    found = losses_and_gradients(logits, packs)
    own = logits.clone().requires_grad_()
    by_pack = [tuple(layer[packs == pack] for layer in own) for pack in range(PACKS)]
    balance = sum(load_balancing_loss_func(layers, EXPERTS, CHOICES) for layers in by_pack)
    z = sum(math.log(math.fsum(math.exp(x) for x in row)) ** 2 for row in logits.flatten(0, 1).tolist())
    (2.0 * balance + 0.5 * own.exp().sum(-1).log().square().sum()).backward()
    torch.testing.assert_close(found[0], balance.detach())
    assert math.isclose(found[1], z, rel_tol=1e-6)
    torch.testing.assert_close(found[2], own.grad)


def test_sum_over_single_packs_equals_all_packs() -> None:
    logits, packs = drawn(torch.float64)
    wanted = losses_and_gradients(logits, packs)
    parts = [losses_and_gradients(logits[:, packs == p], packs[packs == p]) for p in range(PACKS)]
    torch.testing.assert_close(sum(p[0] for p in parts), wanted[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(sum(p[1] for p in parts), wanted[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([p[2] for p in parts], 1), wanted[2], rtol=1e-12, atol=1e-15)


def statistics_of(logits: torch.Tensor, parts: int = 1) -> RouterStats:
    statistics = RouterStats({}, bias_rate=0.0)
    for part in logits.chunk(parts, 1):
        statistics.add(records_of(part))
    return statistics


def test_metrics_have_load_and_entropy_of_each_layer() -> None:
    logits = torch.full((1, 6, 4), -1e4)
    logits[0, :4, 0] = 0.0  # four tokens choose expert 0, two choose expert 1, all with certainty
    logits[0, 4:, 1] = 0.0
    statistics = RouterStats({}, bias_rate=0.0)
    for half in logits.chunk(2, 1):
        statistics.add([RouterRecord("a", half[0], half[0].argmax(1, keepdim=True))])
    total = torch.cat(statistics.local_sums())
    metrics = statistics.metrics(total.tolist())
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    wanted = {"max_over_mean": 4 / 1.5, "entropy": entropy}
    assert metrics == pytest.approx({f"router/{layer}{k}": v for k, v in wanted.items() for layer in ("", "a/")})
    assert statistics.by_layer(total)["a"][0].tolist() == [4, 2, 0, 0]


def test_dense_model_has_no_router_metrics() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 16}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=8))
    recorder = RouterRecorder(model, required=True)
    with recorder.recording() as records:
        model(torch.arange(5)[None])
    assert records == []
    assert recorder.routers == {}
    assert RouterStats({}, bias_rate=0.0).local_sums() == []
    assert RouterStats({}, bias_rate=0.0).metrics([]) == {}


def tiny_moe() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOICES, "moe_intermediate_size": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))


def test_records_match_router_logits_and_loss_of_transformers() -> None:
    model, tokens = tiny_moe(), torch.arange(12)[None]
    recorder = RouterRecorder(model, required=True)
    with recorder.recording() as records:
        own = model(tokens, labels=tokens, output_router_logits=True)
    assert [record.layer for record in records] == [f"model.layers.{i}.mlp.gate" for i in range(LAYERS)]
    for record, logits in zip(records, own.router_logits, strict=True):
        assert torch.equal(record.logits, logits)
    balance = balance_sum(records, torch.zeros(12, dtype=torch.int64), 1, sum_over(None))
    torch.testing.assert_close(balance, own.aux_loss)


def test_recomputed_layers_are_recorded_once_with_gradients() -> None:
    tokens, packs = torch.arange(12)[None], torch.zeros(12, dtype=torch.int64)
    gradients = []
    for recompute in (False, True):
        model = tiny_moe()
        recorder = RouterRecorder(model, required=True)
        if recompute:
            for block in model.model.layers:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        with recorder.recording() as records:
            loss = model(tokens, labels=tokens, use_cache=False).loss
        balance, z = balance_sum(records, packs, 1, sum_over(None)), router_z_sum(records, packs)
        (loss + balance + 0.1 * z).backward()
        assert len(records) == LAYERS
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, wanted in gradients[0].items():
        assert torch.equal(gradients[1][name], wanted), name


def test_correction_bias_moves_against_the_load() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 16, "first_k_dense_replace": 0}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **experts, num_attention_heads=2, moe_intermediate_size=8))
    routers = RouterRecorder(model, required=True).routers
    (name,) = routers
    record = RouterRecord(name, torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int64))
    total = torch.tensor([9.0, 1.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0])  # loads, and probabilities
    statistics = RouterStats(routers, bias_rate=0.001)
    statistics.add([record])
    statistics.update_bias(total)
    bias = correction_bias(routers[name])
    assert bias is not None
    torch.testing.assert_close(bias, torch.tensor([-0.001, 0.001, 0.0, 0.0]))
    plain = nn.Linear(2, 4)
    statistics = RouterStats({"plain": plain}, bias_rate=0.001)
    statistics.add([replace(record, layer="plain")])
    statistics.update_bias(total)
    assert correction_bias(plain) is None


def rank_main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))

    logits, packs = drawn(torch.float64)
    mine, mine_packs = logits.split(SPLIT, 1)[rank], packs.split(SPLIT)[rank]
    result = losses_and_gradients(mine, mine_packs, dist.group.WORLD)
    statistics = statistics_of(mine, parts=2)
    total = torch.cat(statistics.local_sums())
    dist.all_reduce(total)
    metrics = statistics.metrics(total.tolist())
    torch.save((result, metrics), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_router_sums_of_four_ranks_match_one_process(tmp_path: Path) -> None:
    start_four(rank_main, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    logits, packs = drawn(torch.float64)
    balance, z, gradient = losses_and_gradients(logits, packs)
    torch.testing.assert_close(sum(result[0] for result, _ in ranks), balance, rtol=1e-12, atol=0)
    torch.testing.assert_close(sum(result[1] for result, _ in ranks), z, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat([result[2] for result, _ in ranks], 1), gradient, rtol=1e-12, atol=1e-15)
    whole = statistics_of(logits)
    wanted = whole.metrics(torch.cat(whole.local_sums()).tolist())
    for _, metrics in ranks:
        assert metrics == pytest.approx(wanted, rel=1e-12)
