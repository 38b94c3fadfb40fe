"""FLOPs: what we count for a pack and its media, against torch's own counter around a real forward and backward pass.

Torch's counter knows no attention, grouped matmul or LSTM on the CPU, so it is told: pairs that a mask hides do not
count, and neither do scores that the backward pass of attention computes again.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_cases import FOLDERS, MAKERS
from decoder_cases import item as item_of
from decoder_cases import sound as long_sound
from encoder_cases import ENCODERS, some_media
from omni import SENSOR, write_omni_config
from steps import step_by_step
from tiny import SHAPE, write_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from omnizoo.balancing.balancer import Balancer
from omnizoo.balancing.prefetch import next_step
from omnizoo.config.load import load_config
from omnizoo.data.loading.loader import build_loader
from omnizoo.modalities.decoders.audio_codec import AudioCodec
from omnizoo.modalities.flop_count import causal_pairs
from omnizoo.models.build import build_model
from omnizoo.models.flops import attention_width
from omnizoo.models.media.model_inputs import read_modalities
from omnizoo.models.read_config import load_tokenizer
from omnizoo.ops.linear_attention import recurrence
from omnizoo.parallel.mesh import build_mesh
from omnizoo.parallel.process import process_group
from omnizoo.parallelize.parallelize import parallelize_model
from omnizoo.training.objective import build_objective

aten = torch.ops.aten
WITHOUT_MATMULS = ("patches", "flow of pixels", "flow of a series")  # their costs are guesses, of next to nothing
ROOT = Path(__file__).parents[2]


def attention(q: Any, k: Any, v: Any, p: float = 0, causal: bool = False, attn_mask: Any = None, **_: Any) -> float:
    n, m = q.shape[2], k.shape[2]
    pairs = causal_pairs(n) if causal else n * m
    if attn_mask is not None:
        seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
        pairs = int(seen.expand(*q.shape[:2], n, m).sum()) / (q.shape[0] * q.shape[1])
    return 2 * q.shape[0] * q.shape[1] * pairs * (q.shape[-1] + v.shape[-1])


def attention_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, p: float, causal: bool, attn_mask: Any = None, **_: Any
) -> float:
    return 2 * attention(q, k, v, p, causal, attn_mask)


def recurrent(rows: Any, input_weight: Any, state_weight: Any, *_: Any, **__: Any) -> float:
    return 2 * rows.shape[0] * rows.shape[1] * (input_weight.numel() + state_weight.numel())


def grouped(left: Any, right: Any, *_: Any, **__: Any) -> float:
    """Count rows [N, A] times experts [E, A, B]; for the gradient of the weights, [A, N] times [N, B]."""
    return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]


def depthwise_backward(grad: Any, _: Any, weight: Any, *__: Any, **___: Any) -> float:
    """Count a depthwise convolution, which torch's formula counts as a convolution over all channels."""
    return 4 * weight.numel() * grad.shape[-1]


depthwise_backward._get_raw = True  # type: ignore[attr-defined]

MAPPING = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    aten._grouped_mm: grouped,
    aten.mkldnn_rnn_layer: recurrent,
}
for formula in MAPPING.values():
    formula._get_raw = True  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def sensor_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SENSOR))


def counts(path: Path, *overrides: str, packs: int = 8) -> tuple[float, float]:
    """Return our FLOPs and torch's FLOPs of a run's first step, in one micro-batch."""
    batch = [f"--train.packs_per_step={packs}", f"--train.micro_batch={packs}"]
    config = load_config(path, [*batch, *overrides])
    with process_group() as process:
        mesh = build_mesh(config, process)
        model = build_model(config.model, "fp32")
        loader = build_loader(config, load_tokenizer(config.model), 0, 1, **read_modalities(model, config.model))
        parallelize_model(model, mesh, config)
        objective = build_objective(model.train(), mesh, config)
        data = next_step(loader, Balancer(model, mesh, config))
        assert all(item for batch in data.micro_batches for item in batch.media.values())  # no dummy input
        with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
            for batch in data.micro_batches:
                torch.stack([term.weight * term.sum for term in objective.terms(batch)]).sum().backward()
        return data.totals.flops, counter.get_total_flops()


DENSE = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},  # four queries to two keys, too
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
SPARSE = {
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2}
    | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8},
}


GATED = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8}
HYBRID = {
    "qwen3_5_text": GATED | {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": LATENT
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4}
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 16}
    | {"pad_token_id": 0, "head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
}


@pytest.mark.parametrize(
    "family", [f if f in ("qwen3_5_text", "bamba") else pytest.param(f, marks=pytest.mark.long) for f in HYBRID]
)
def test_recurrent_layer_flops_match_torch_counter(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("delta_rule", "linear_rule"):

        def rule(*given: Any, is_delta: bool = name == "delta_rule") -> Any:
            *tokens, lengths, _ = given
            nothing = tokens[2].new_zeros(len(lengths), tokens[2].shape[1], tokens[1].shape[2], tokens[2].shape[2])
            # With an initial state, so the first token of a sample is not cheaper than others.
            return step_by_step(*tokens, lengths, nothing.requires_grad_(), is_delta)

        monkeypatch.setattr(recurrence, name, rule)
    monkeypatch.setitem(MAPPING, aten.convolution_backward, depthwise_backward)
    config = {"model_type": family} | SHAPE | HYBRID[family]
    ours, torchs = counts(write_config(tmp_path, model={"config": config}), packs=2)  # one token at a time is slow
    assert ours == pytest.approx(torchs, rel=0.01)


@pytest.mark.parametrize("family", [*DENSE, *SPARSE])
def test_text_model_flops_match_torch_counter(family: str, tmp_path: Path) -> None:
    config = {"model_type": family} | SHAPE | (DENSE | SPARSE)[family]
    path = write_config(tmp_path, model={"config": config})
    ours, torchs = counts(path)
    assert ours == pytest.approx(torchs, rel=0.01)


FROZEN = {
    "nothing": [],
    "towers": [f"model.modalities.{name}.encoder" for name in ("image", "audio", "video")],
    "foundation": ["model.foundation"],
    "projectors": [f"model.modalities.{name}.projector" for name in ("image", "audio", "video")],
    "decoders": [f"model.modalities.{name}.decoder" for name in ("image", "audio", "series")],
    "all but decoders": ["model.foundation"]
    + [f"model.modalities.{name}.encoder" for name in ("image", "audio", "video", "series")]
    + [f"model.modalities.{name}.projector" for name in ("image", "audio", "video")],
}


@pytest.fixture(scope="module")
def omni_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_omni_config(tmp_path_factory.mktemp("omni"), "qwen3_moe")


@pytest.mark.parametrize("frozen", FROZEN)
def test_composed_model_flops_depend_on_trained_components(frozen: str, omni_config: Path) -> None:
    ours, torchs = counts(omni_config, *(f"--{part}.freeze=true" for part in FROZEN[frozen]))
    assert ours == pytest.approx(torchs, rel=0.01)


VISUAL, HEARD = ("image", "video"), ("audio",)
PUBLISHED = {
    "qwen3_vl": ("qwen3_vl", []),
    "qwen3_vl_moe": ("qwen3_vl_moe", []),
    "qwen3_omni": ("qwen3_omni", []),
    "qwen3_omni, towers frozen": ("qwen3_omni", [*VISUAL, *HEARD]),
    # Not Mistral 3, which pads pixels to the largest image of a call, nor LLaVA, whose last layer has no backward.
    **{family: (family, []) for family in ("gemma3", "internvl", "gemma4")},
}


COUNTED = ("qwen3_omni", "gemma4")  # in every run of the tests; the others in `make verify-all`


@pytest.mark.parametrize(
    "name", [name if name in COUNTED else pytest.param(name, marks=pytest.mark.long) for name in PUBLISHED]
)
def test_multimodal_model_flops_match_torch_counter(name: str) -> None:
    file, frozen = PUBLISHED[name]
    overrides = [f"--model.modalities.{of}.encoder.freeze=true" for of in frozen]
    ours, torchs = counts(ROOT / "examples" / "published" / f"{file}.yaml", *overrides)
    assert ours == pytest.approx(torchs, rel=0.01)


def test_pair_flops_use_key_and_value_widths() -> None:
    config = AutoConfig.for_model("deepseek_v3")
    assert attention_width(config) == 128 * (192 + 128) / 2


def test_pair_count_matches_attention_mask() -> None:
    for length, window in [(1, None), (6, None), (6, 1), (6, 4), (6, 6), (6, 9)]:
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < (window or length))
        assert causal_pairs(length, window) == int(mask.sum())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_cost_matches_torch_counter(name: str, frozen: bool) -> None:
    encoder = ENCODERS[name]().requires_grad_()
    assert encoder.pretrained is not None
    encoder.pretrained.requires_grad_(not frozen)
    media = some_media(encoder)[1]
    items = [encoder.prepare(media)] * 20  # what runs once for all of them does not show
    with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
        encoder.encode(items).square().sum().backward()
    assert 20 * encoder.measure(media).cost == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in WITHOUT_MATMULS])
def test_decoder_cost_matches_torch_counter(name: str, tmp_path: Path) -> None:
    folder = FOLDERS[name](tmp_path / "folder") if name in FOLDERS else None
    decoder = MAKERS[name](folder)
    media = long_sound(0, 8000) if isinstance(decoder, AudioCodec) else item_of(name, 0)
    with FlopCounterMode(display=False, custom_mapping=MAPPING) as counter:
        decoder.targets([decoder.prepare(media)])
    assert decoder.measure(media).cost == pytest.approx(counter.get_total_flops(), rel=0.01)
