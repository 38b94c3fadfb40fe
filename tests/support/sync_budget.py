"""Where the host may wait for the device in a training step, by file and function, and why. Anything else fails a test.

An entry that no dry run meets any more fails as well: take it out.
"""

ALLOWED = {
    ("omnizoo/parallel/experts.py", "split"): "how many rows go to and come from each rank sizes the all-to-all",
    (
        "omnizoo/parallel/experts.py",
        "max_over_group",
    ): "parallel.tile_tokens and ep: into how many tiles all ranks cut a layer",
    ("omnizoo/ops/device.py", "__init__"): "once a step, losses and gradient norm: is it finite, and what is logged",
    # Only where no kernel takes the boundaries of samples: fp32, fp64, attention dropout.
    ("omnizoo/ops/attention/packed.py", "lengths"): "attention sample by sample",
}
