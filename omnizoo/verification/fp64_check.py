"""Second check of `verify` in fp32, for gradients whose rounding errors exceed the tolerance.

A gradient that is a small difference of large numbers has few correct digits in fp32, both in one process and in any
layout. The two results may therefore disagree although the layout has no defect. A trial in fp64 separates the two
causes: it removes rounding errors, but not defects. A layout passes under two conditions:

- In fp64, it agrees with one process within the fp64 tolerance.
- In fp32, its difference from one process is at most `FACTOR` times the error of this process, measured against fp64.
"""

from dataclasses import replace
from pathlib import Path

from omnizoo.config.schema import Config
from omnizoo.parallel.layout import Layout
from omnizoo.verification.compare import Verdict, gradient_differences, verdict_of
from omnizoo.verification.prepare import load_trial, prepare

# Maximum ratio between the difference of a layout and the fp32 error of one process. Errors vary, because the layout
# determines which additions are rounded.
FACTOR = 10.0


def recheck_in_fp64(config: Config, layout: Layout, folder: Path, verdict: Verdict, device: str = "cpu") -> Verdict:
    """Repeat the trial of a failed layout in fp64, if rounding errors may explain the failure.

    Rounding errors may explain a failure if only gradients differ, by at most `FACTOR` times the error of one process
    in fp32.

    Args:
        config: The user's config.
        layout: The layout that failed.
        folder: Folder that `prepare` wrote in fp32. Its subfolder `fp64` is created if needed.
        verdict: The verdict in fp32.
        device: Device type of the ranks.

    Returns:
        The final verdict, with a note if the layout passed because of the fp64 trial.
    """
    if not verdict.beyond:
        return verdict
    fp64_folder = folder / "fp64"
    if not fp64_folder.exists():
        prepare(config, layout.world, str(layout), "fp64", fp64_folder, device)
    fp32_errors = gradient_differences(load_trial(folder).gradients, load_trial(fp64_folder).gradients)
    for name, difference in verdict.beyond.items():
        if not difference <= FACTOR * fp32_errors[name]:
            return verdict

    fp64_verdict = verdict_of(fp64_folder, layout, device)
    if not fp64_verdict.passed:
        return replace(verdict, reason=f"{verdict.reason}; also in fp64: {fp64_verdict.reason}")
    note = (
        f"in fp64 ({fp64_verdict.gradient:.0e}); in fp32, one process computes the gradient of {verdict.worst} with an "
        f"error of {fp32_errors[verdict.worst]:.0e}, and {layout} differs from this process by {verdict.gradient:.0e}"
    )
    return replace(verdict, passed=True, reason="", note=note)
