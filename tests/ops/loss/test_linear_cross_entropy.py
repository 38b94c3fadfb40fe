"""Head and loss chunk by chunk against plain torch: the same loss and gradients, in a fraction of the memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from omnizoo.ops.loss.cross_entropy import cross_entropy_sum
from omnizoo.ops.loss.linear_cross_entropy import LinearHead, linear_cross_entropy_sum

ROWS, WIDTH, VOCABULARY = 37, 24, 101


def plain(
    hidden: torch.Tensor,
    head: LinearHead,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    logits = F.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    loss = loss + z_loss * logits.logsumexp(1).square()
    return (loss if weights is None else loss * weights).sum()


def drawn(dtype: torch.dtype, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    return draw(rows, WIDTH), draw(VOCABULARY, WIDTH), draw(VOCABULARY), targets


@pytest.mark.parametrize("chunk", [VOCABULARY, 10 * VOCABULARY, 2**26])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("biased", "scale", "softcap", "label_smoothing", "z_loss"),
    [
        (False, 1.0, None, 0.0, 0.0),
        (True, 1.0, None, 0.1, 0.0),
        (False, 0.25, None, 0.0, 0.01),
        (True, 0.5, 3.0, 0.2, 0.02),
    ],
)
def test_loss_and_gradients_match_plain_torch(
    chunk: int, weighted: bool, biased: bool, scale: float, softcap: float | None, label_smoothing: float, z_loss: float
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        hidden, weight, bias, targets = drawn(dtype)
        leaves = [hidden, weight, *([bias] if biased else [])]
        head = LinearHead(weight, bias if biased else None, scale, softcap)
        weights = torch.rand(ROWS, dtype=dtype, generator=torch.Generator().manual_seed(1)) if weighted else None
        args = (hidden, head, targets, weights, label_smoothing, z_loss)
        expected, found = plain(*args), linear_cross_entropy_sum(*args, chunk=chunk)
        wanted = torch.autograd.grad(expected / 3, leaves)
        given = torch.autograd.grad(found / 3, leaves)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
        for mine, theirs in zip(given, wanted, strict=True):
            assert (mine - theirs).norm() <= tolerance * theirs.norm()


def test_bf16_loss_is_as_accurate_as_plain_torch() -> None:
    hidden, weight, _, targets = drawn(torch.bfloat16)
    exact = [leaf.detach().float().requires_grad_() for leaf in (hidden, weight)]
    args = (targets, None, 0.0, 0.0)
    precise = torch.autograd.grad(plain(exact[0], LinearHead(exact[1]), *args), exact)
    theirs = torch.autograd.grad(plain(hidden, LinearHead(weight), *args), (hidden, weight))
    ours = torch.autograd.grad(
        linear_cross_entropy_sum(hidden, LinearHead(weight), *args, chunk=8 * VOCABULARY), (hidden, weight)
    )
    for mine, plain_, true in zip(ours, theirs, precise, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - true).norm() <= 1.5 * (plain_.float() - true).norm() + 1e-3 * true.norm()


def test_no_rows_give_zero_loss_and_zero_gradients() -> None:
    hidden, weight, bias, targets = drawn(torch.float32, rows=0)
    loss = linear_cross_entropy_sum(hidden, LinearHead(weight, bias), targets)
    loss.backward()
    assert loss == 0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in (hidden, weight, bias))


def test_frozen_head_and_hidden_states_get_no_gradient() -> None:
    hidden, weight, _, targets = drawn(torch.float32)
    for leaves in ((hidden,), (weight,)):
        given = [leaf if any(leaf is kept for kept in leaves) else leaf.detach() for leaf in (hidden, weight)]
        found = torch.autograd.grad(linear_cross_entropy_sum(given[0], LinearHead(given[1]), targets), leaves)
        wanted = torch.autograd.grad(plain(hidden, LinearHead(weight), targets, None, 0.0, 0.0), leaves)
        torch.testing.assert_close(found, wanted)


def test_second_backward_raises() -> None:
    hidden, weight, _, targets = drawn(torch.float32)
    loss = linear_cross_entropy_sum(hidden, LinearHead(weight), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="once"):
        loss.backward()


class Largest(TorchDispatchMode):
    """The largest tensor that any operator gives, in elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.most = max(self.most, out.numel())
        return out


def test_memory_is_limited_to_one_chunk_of_logits() -> None:
    hidden, weight, _, targets = drawn(torch.float32)
    with Largest() as watching:
        linear_cross_entropy_sum(
            hidden, LinearHead(weight), targets, label_smoothing=0.1, chunk=2 * VOCABULARY
        ).backward()
    assert watching.most <= max(2 * VOCABULARY, weight.numel())


def test_row_losses_requested_sum_and_gradient_stay_bit_identical() -> None:
    logits = torch.randn(997, 61, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.arange(997) % 61
    row_losses = torch.empty(997)
    losses = [cross_entropy_sum(logits, targets), cross_entropy_sum(logits, targets, row_losses=row_losses)]
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in losses]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(gradients[0], gradients[1])
    assert torch.allclose(row_losses.sum(), losses[0], rtol=1e-6)
