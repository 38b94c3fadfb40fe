"""GRPO and GSPO by their published formulas, in float64, sample by sample in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_config

from omnizoo.balancing.step_plan import StepTotals
from omnizoo.cli.main import main
from omnizoo.config.errors import UserError
from omnizoo.config.load import load_config
from omnizoo.training.local_batch import LocalBatch
from omnizoo.training.losses.base import build_losses
from omnizoo.training.losses.policy import GRPO, GSPO, Policy

LENGTHS = [3, 0, 5, 1, 4]  # the second sample has no target
LOSSES: list[Policy] = [
    GRPO(),
    GRPO(clip_low=0.1, clip_high=0.3, beta=0.04),
    GRPO(aggregation="sample", beta=0.1),
    GRPO(aggregation="constant", length=16, beta=0.1),
    GSPO(),
    GSPO(clip_low=0.1, clip_high=0.2, beta=0.2, temperature=0.7),
]


def published(loss: Policy, new: Any, old: Any, reference: Any, advantage: Any) -> torch.Tensor:
    """The loss of a whole step by lists of samples."""
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    totals, kls = [], []
    for pi, before, ref, a in zip(new, old, reference, advantage, strict=True):
        ratio = pi.exp() / before.exp()
        if isinstance(loss, GSPO):
            ratio = (pi.sum() / len(pi) - before.sum() / len(pi)).exp()
            a = a.mean()
        totals.append(-torch.min(ratio * a, torch.clip(ratio, low, high) * a))
        kls.append(ref.exp() / pi.exp() - (ref - pi) - 1)
    if isinstance(loss, GSPO):
        return torch.stack([t + loss.beta * kl.mean() for t, kl in zip(totals, kls, strict=True)]).mean()
    each = [t + loss.beta * kl for t, kl in zip(totals, kls, strict=True)]
    if loss.length is not None:
        return torch.stack([values.sum() / loss.length for values in each]).mean()
    return torch.stack([v.mean() for v in each]).mean() if loss.is_by_answer else torch.cat(each).mean()


def batch_of(sample: torch.Tensor, columns: dict[str, torch.Tensor]) -> LocalBatch:
    """A micro-batch of targets alone, by the sample of each."""
    inputs = {"logits_to_keep": torch.arange(len(sample))}
    return LocalBatch(inputs, columns | {"sample_of_token": sample}, num_packs=1, num_samples=len(LENGTHS))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_policy_losses_match_published_formulas(loss: Policy) -> None:
    dice = torch.Generator().manual_seed(0)
    count, answers = sum(LENGTHS), sum(length > 0 for length in LENGTHS)
    sample = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    logits = torch.randn(count, 11, generator=dice, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (count,), generator=dice)
    new = torch.log_softmax(logits / loss.temperature, 1)[torch.arange(count), targets]
    old, reference = (new.detach() + 0.3 * torch.randn(count, generator=dice, dtype=torch.float64) for _ in range(2))
    advantage = torch.randn(len(LENGTHS), generator=dice, dtype=torch.float64)[sample]
    numbers = {"advantage": advantage, "old": old, "reference": reference}
    loss.num_sharing, loss.sum_over_sp = 1, lambda tensor: tensor
    totals = StepTotals(40, 1, {"text": count}, count, 0.0, answers=answers)
    found = loss.from_logits(logits, batch_of(sample, numbers | {"labels": targets})) / loss.count(totals)
    (gradient,) = torch.autograd.grad(found, logits)

    split = [
        [part for part in values.split(LENGTHS) if len(part)]
        for values in (new, old.detach(), reference.detach(), advantage)
    ]
    expected = published(loss, *split)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0], rtol=1e-10, atol=1e-14)
    measured = {name: value / loss.metric_count(name, totals) for name, value in loss.metric_sums.items()}
    ratios = [(pi - before).exp() for pi, before in zip(*split[:2], strict=True)]
    ratio = torch.cat(ratios).mean()
    if isinstance(loss, GSPO):
        ratio = torch.stack([(pi - before).mean().exp() for pi, before in zip(*split[:2], strict=True)]).mean()
    elif loss.is_by_answer:
        ratio = torch.stack([part.mean() for part in ratios]).mean()
    torch.testing.assert_close(measured["ratio"], ratio.detach())
    assert 0 < measured["clipped"] < 1
    assert min(measured["kl"], measured["reference_kl"]) > 0


def test_losses_of_ranks_sum_to_one_process() -> None:
    """Two ranks by hand: what each would sum over both is worked out before."""
    dice = torch.Generator().manual_seed(1)
    count = sum(LENGTHS)
    sample = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    each = torch.randn(count, generator=dice, dtype=torch.float64, requires_grad=True)
    extra = {
        name: torch.randn(count, generator=dice, dtype=torch.float64) for name in ("advantage", "old", "reference")
    }
    for loss in (GRPO(aggregation="sample", beta=0.1), GSPO(clip_low=0.5, clip_high=0.5, beta=0.1)):
        values: dict[str, list[torch.Tensor]] = {"whole": [], "halves": []}
        for name, ranks in (("whole", [slice(None)]), ("halves", [slice(0, None, 2), slice(1, None, 2)])):
            # first what each rank would send, then with the sums of both
            sent: list[list[torch.Tensor]] = [[] for _ in ranks]
            for is_told in (False, True):
                results = []
                for rank, own in enumerate(ranks):
                    batch = batch_of(sample[own], {key: value[own] for key, value in extra.items()})
                    calls = iter(range(9))

                    def add_up(tensor: torch.Tensor, rank: int = rank, calls: Any = calls) -> torch.Tensor:
                        call = next(calls)
                        if not is_told:  # noqa: B023 - called in this round only
                            sent[rank].append(tensor)  # noqa: B023
                            return tensor
                        return torch.stack([from_rank[call] for from_rank in sent]).sum(0)  # noqa: B023

                    loss.num_sharing, loss.sum_over_sp = len(ranks), add_up
                    results.append(loss.loss_of_tokens(each[own], batch))
            total = torch.stack(results).sum()
            values[name] = [total.detach(), *torch.autograd.grad(total, each)]
        torch.testing.assert_close(values["halves"], values["whole"], rtol=1e-12, atol=1e-14)


def test_invalid_policy_options_and_uses_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, reason in (
        ({"aggregation": "mean"}, "train.losses.0.options.aggregation"),
        ({"clip_low": 0}, "train.losses.0.options.clip_low"),
        ({"aggregation": "constant"}, "length: not set, but aggregation is constant"),
        ({"length": 7}, "length: 7 has no effect with aggregation: token"),
    ):
        with pytest.raises(UserError) as caught:
            build_losses(load_config(write_config(tmp_path, train={"losses": [{"kind": "grpo", "options": options}]})))
        assert reason in str(caught.value)
    assert main(["train", str(write_config(tmp_path, train={"losses": [{"kind": "gspo"}]}))]) == 2
    err = capsys.readouterr().err
    assert "train.losses.0.kind: gspo requires the columns advantage, old" in err
    assert "Traceback" not in err
