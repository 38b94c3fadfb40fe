"""Allowed host syncs of a training step by file and function, with the reason. A test fails on any other host sync.

The test also fails on an entry that no dry run has: remove it.
"""

ALLOWED = {
    ("omnizoo/parallel/experts.py", "split"): "the all-to-all needs the number of rows for each rank",
    (
        "omnizoo/parallel/experts.py",
        "max_over_group",
    ): "parallel.tile_tokens with ep: all ranks use the same number of tiles",
    ("omnizoo/ops/device.py", "__init__"): "once per step: losses and gradient norm are checked and logged",
    # Only if no kernel supports sample boundaries: fp32, fp64, attention dropout.
    ("omnizoo/ops/attention/packed.py", "lengths"): "attention runs one sample at a time",
}
