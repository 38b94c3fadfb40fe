"""Compare the trial of a layout with the one-process trial.

Find the largest differences, and the first module that differs.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import torch

from omnizoo.config.load import load_config
from omnizoo.parallel.layout import Layout
from omnizoo.parallel.process import Process
from omnizoo.verification.bf16_check import allowed
from omnizoo.verification.prepare import ROUNDED, load_trial
from omnizoo.verification.rank_processes import run_in_processes
from omnizoo.verification.trial import Trial, run_trial


@dataclass(frozen=True)
class Tolerance:
    """Maximum differences of a layout that passes."""

    loss: float  # maximum relative difference
    gradient: float  # maximum difference, relative to the norm of each tensor


MAX_ROUNDED = 4  # maximum number of listed inputs that lose precision
TOLERANCE = {"fp32": Tolerance(loss=1e-6, gradient=1e-5), "fp64": Tolerance(loss=1e-9, gradient=1e-9)}


@dataclass(frozen=True)
class Verdict:
    """Result of comparing one layout with one process."""

    layout: str
    passed: bool
    loss: float  # relative difference at the first step
    later_loss: float  # largest relative difference at later steps, amplified by the optimizer
    gradient: float  # relative difference of the gradient of `worst`
    worst: str  # parameter whose gradient differs most
    grad_norm: float  # largest relative difference of the gradient norms
    calls: dict[str, int]  # collectives of the last step on rank 0, by kind
    bytes: dict[str, int]  # bytes of rank 0's inputs to these collectives, by kind
    reason: str = ""  # if failed: the differences, and the first module that differs
    beyond: dict[str, float] = field(default_factory=dict)  # gradients beyond the tolerance, if nothing else differs
    note: str = ""  # if the layout passed after a second check: the result of that check


def verdict_of(folder: Path, layout: Layout, device: str = "cpu") -> Verdict:
    """Run the trial of `layout` in new processes, and compare it with the reference.

    Args:
        folder: Folder that `prepare` wrote, with the config and the reference.
        layout: The layout to verify.
        device: Device type of the ranks.

    Raises:
        RankError: If a rank fails, or if the ranks do not finish in time.
    """
    run_in_processes(layout.world, try_layout, folder, layout, device=device)
    return Verdict(**json.loads((folder / "verdict.json").read_text()))


def failed(layout: Layout, reason: str) -> Verdict:
    """Return the verdict for a layout whose processes failed or did not finish."""
    unknown = float("nan")
    return Verdict(
        layout=str(layout),
        passed=False,
        loss=unknown,
        later_loss=unknown,
        gradient=unknown,
        worst="",
        grad_norm=unknown,
        calls={},
        bytes={},
        reason=reason,
    )


def try_layout(process: Process, folder: Path, layout: Layout) -> None:
    """Run the trial on this rank. Rank 0 compares it with the reference and writes `verdict.json` to `folder`.

    Collective: all ranks must call it.
    """
    config = load_config(folder / "config.yaml", [])
    trial = run_trial(config, layout, process)
    if process.rank != 0:
        return
    reference = load_trial(folder)
    precision = config.train.precision
    if precision == "bf16":
        verdict = compare_rounded(trial, reference, load_trial(folder / ROUNDED), str(layout))
    else:
        verdict = compare(trial, reference, str(layout), TOLERANCE[precision])
    (folder / "verdict.json").write_text(json.dumps(asdict(verdict)))


def compare(trial: Trial, reference: Trial, layout: str, tolerance: Tolerance) -> Verdict:
    """Compare a layout with one process in the same precision."""
    differences = gradient_differences(trial.gradients, reference.gradients)
    worst = max(differences, key=lambda name: differences[name])
    losses = _relative(trial.losses, reference.losses)
    norms = _relative(trial.grad_norms, reference.grad_norms)

    reasons = _mismatches(trial, reference)
    checks = (
        ("loss", losses[0], tolerance.loss),
        ("loss of a source", _source_difference(trial, reference), tolerance.gradient),
        ("gradient norm", norms[0], tolerance.gradient),
        # The optimizer amplifies rounding errors, so the tolerance for losses of later steps is 10 times that for
        # gradients.
        ("loss of a later step", max(losses), 10 * tolerance.gradient),
    )
    for name, difference, limit in checks:
        if not difference <= limit:
            reasons.append(f"the {name} differs by {difference:.1e}")
    beyond = {name: difference for name, difference in differences.items() if not difference <= tolerance.gradient}
    if beyond:
        reasons.append(f"the gradient of {worst} differs by {differences[worst]:.1e}")
    only_gradients = bool(beyond) and len(reasons) == 1
    if reasons:
        reasons.append(first_difference(trial, reference, differences, tolerance))
    verdict = _verdict(trial, reference, layout, worst, differences[worst], reasons)
    return replace(verdict, beyond=beyond) if only_gradients else verdict


def compare_rounded(trial: Trial, reference: Trial, rounded: Trial, layout: str) -> Verdict:
    """Compare a layout in bf16 with one process in fp32 (`reference`).

    The errors of one process in bf16 (`rounded`) determine the tolerance.
    """
    errors = gradient_differences(trial.gradients, reference.gradients)
    usual_errors = gradient_differences(rounded.gradients, reference.gradients)
    median_error = median(usual_errors.values())
    excess = {name: error / allowed(usual_errors.get(name, 0.0), median_error) for name, error in errors.items()}
    worst = max(excess, key=lambda name: excess[name])
    losses = _relative(trial.losses, reference.losses)
    usual_losses = _relative(rounded.losses, reference.losses)
    norms = _relative(trial.grad_norms, reference.grad_norms)
    usual_norms = _relative(rounded.grad_norms, reference.grad_norms)

    reasons = trial.rounded[:MAX_ROUNDED]
    if len(trial.rounded) > MAX_ROUNDED:
        reasons.append(f"and {len(trial.rounded) - MAX_ROUNDED} more rounded inputs")
    reasons += _mismatches(trial, reference)
    checks = (
        ("loss", losses[0], usual_losses[0], 0.0),
        ("gradient norm", norms[0], usual_norms[0], 0.0),
        ("loss of a later step", max(losses), max(usual_losses), 0.0),
        (f"gradient of {worst}", errors[worst], usual_errors.get(worst, 0.0), median_error),
    )
    for name, error, usual_error, floor in checks:
        if not error <= allowed(usual_error, floor):
            reasons.append(f"the {name} differs from fp32 by {error:.1e} (one process in bf16: {usual_error:.1e})")
    if reasons and not trial.rounded:
        reasons.append(_first_excess(trial, reference, rounded))
    return _verdict(trial, reference, layout, worst, errors[worst], reasons)


def _mismatches(trial: Trial, reference: Trial) -> list[str]:
    """Return the reasons why two trials cannot be compared: different token counts, or different sets of gradients."""
    reasons = []
    if list(map(set, trial.losses_by_source)) != list(map(set, reference.losses_by_source)):
        reasons.append("the steps contain other sources than in one process")
    if trial.tokens != reference.tokens:
        reasons.append(f"the tokens per step are {trial.tokens}, but {reference.tokens} in one process")
    unmatched = sorted(set(trial.gradients) ^ set(reference.gradients))
    if unmatched:
        reasons.append(f"only one of the two trials has gradients of {', '.join(unmatched[:3])}")
    return reasons


def _verdict(
    trial: Trial, reference: Trial, layout: str, worst: str, gradient: float, reasons: Sequence[str]
) -> Verdict:
    """Return the verdict on a layout. It passes if `reasons`, the list of defects that were found, is empty."""
    losses = _relative(trial.losses, reference.losses)
    return Verdict(
        layout=layout,
        passed=not reasons,
        loss=losses[0],
        later_loss=max(losses[1:], default=0.0),
        gradient=gradient,
        worst=worst,
        grad_norm=max(_relative(trial.grad_norms, reference.grad_norms)),
        calls=trial.calls,
        bytes=trial.bytes,
        reason="; ".join(reasons),
    )


def _source_difference(trial: Trial, reference: Trial) -> float:
    """Return the largest relative difference of the loss on a source in the first step; 0 with only one source."""
    losses = trial.losses_by_source[0]
    expected = {name: loss for name, loss in reference.losses_by_source[0].items() if name in losses}
    return max(_relative([losses[name] for name in expected], list(expected.values())), default=0.0)


def _relative(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return the relative difference of each value from the reference."""
    return [abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True)]


def _first_excess(trial: Trial, reference: Trial, rounded: Trial) -> str:
    """Return a message about the first module whose error in bf16 is too large, compared with one process in bf16."""
    for name, expected in reference.activations.items():  # in order of execution
        if name not in trial.activations or name not in rounded.activations:
            continue
        error = relative(trial.activations[name], expected)
        usual_error = relative(rounded.activations[name], expected)
        if not error <= allowed(usual_error):
            return f"the first difference is the output of {name} ({error:.1e}; one process in bf16: {usual_error:.1e})"
    return "activations of the first pack are as close to fp32 as in one process"


def gradient_differences(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the difference of each gradient, relative to the norm of the reference gradient.

    Some gradients are zero except for rounding errors, such as the gradient of a key bias, because softmax cancels this
    bias. Their difference is relative to the norm of all gradients of the module instead.
    """
    squares: dict[str, float] = {}
    for name, grad in reference.items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + float(grad.double().norm()) ** 2
    differences = {}
    for name, grad in gradients.items():
        expected = reference[name]
        module_norm = squares[name.rpartition(".")[0]] ** 0.5
        rounding_error = 100 * torch.finfo(expected.dtype).eps * module_norm
        is_zero = float(expected.double().norm()) <= rounding_error
        differences[name] = relative(grad, expected, module_norm if is_zero else None)
    return differences


def first_difference(trial: Trial, reference: Trial, gradients: dict[str, float], tolerance: Tolerance) -> str:
    """Return a message about the first tensor that differs.

    Activations are compared in forward order. If all of them agree, gradients are compared in the reverse order.
    """
    for name, expected in reference.activations.items():  # in order of execution
        if name not in trial.activations:
            continue
        difference = relative(trial.activations[name], expected)
        if not difference <= tolerance.gradient:
            return f"the first difference is the output of {name} ({difference:.1e})"

    forward_order = {module: position for position, module in enumerate(reference.executed)}

    def position_in_forward(parameter: str) -> int:
        module = parameter.rpartition(".")[0]
        return forward_order.get(module, -1)

    for name in sorted(reference.gradients, key=position_in_forward, reverse=True):
        if name in gradients and not gradients[name] <= tolerance.gradient:
            return f"forward agrees; the first difference in backward is the gradient of {name} ({gradients[name]:.1e})"
    return "activations and gradients of the first step agree, so the difference arises after the backward pass"


def relative(a: torch.Tensor, b: torch.Tensor, scale: float | None = None) -> float:
    """Return |a - b| / |b|, or |a - b| / `scale` if it is set. If the divisor is 0, return |a - b|."""
    if a.shape != b.shape:
        return float("inf")
    norm = float(b.double().norm()) if scale is None else scale
    difference = float((a.double() - b.double()).norm())
    return difference / norm if norm else difference
