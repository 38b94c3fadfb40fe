"""`verify` in fp32, where one process itself does not know a gradient to the tolerance.

A gradient that is a small difference of large numbers has few right digits in fp32, in one process as in any layout,
and the two have different ones. More digits decide it: rounding goes away, a defect stays. Such a layout passes if in
fp64 it agrees as every layout in fp64 must, and if in fp32 it is not much farther from one process than one process is
from fp64.
"""

from dataclasses import replace
from pathlib import Path

from omnizoo.config.schema import Config
from omnizoo.parallel.layout import Layout
from omnizoo.verification.compare import Verdict, gradient_differences, verdict_of
from omnizoo.verification.prepare import load_trial, prepare

# Times the error of one process: which additions are rounded depends on the layout.
FACTOR = 10.0


def decide(config: Config, layout: Layout, folder: Path, verdict: Verdict, device: str = "cpu") -> Verdict:
    """The verdict on a layout that failed in fp32, tried again in fp64 if only gradients differ, and only so much as
    one process might be wrong about them. `folder` is what `prepare` has written in fp32."""
    if not verdict.beyond:
        return verdict
    exact = folder / "fp64"
    if not exact.exists():
        prepare(config, layout.world, str(layout), "fp64", exact, device)
    own = gradient_differences(load_trial(folder).gradients, load_trial(exact).gradients)
    if any(not difference <= FACTOR * own[name] for name, difference in verdict.beyond.items()):
        return verdict
    again = verdict_of(exact, layout, device)
    if not again.passed:
        return replace(verdict, reason=f"{verdict.reason}; also in fp64: {again.reason}")
    note = (
        f"in fp64 ({again.gradient:.0e}); in fp32 {verdict.worst} is {own[verdict.worst]:.0e} off in one process, "
        f"and {verdict.gradient:.0e} from it on {layout}"
    )
    return replace(verdict, passed=True, reason="", note=note)
