"""Where the host may wait for the device in a training step, by file and function, and why. Anything else fails a test.

An entry that no dry run meets any more fails as well: take it out.
"""

ALLOWED = {
    ("omnizoo/parallel/experts.py", "split"): "how many rows go to and come from each rank sizes the all-to-all",
    ("omnizoo/ops/device.py", "__init__"): "once a step, losses and gradient norm: is it finite, and what is logged",
    # Only where no kernel takes the boundaries of samples: fp32, fp64, attention dropout.
    ("omnizoo/ops/attention.py", "lengths"): "attention sample by sample",
    # transformers' own code, which is not ours to change.
    ("omnizoo/recipes/qwen_towers.py", "encode"): "towers read the sizes of items on the host",
    ("omnizoo/training/forward.py", "forward"): "places of media are picked by masks",
    ("transformers/models/qwen3_vl_moe/modeling_qwen3_vl_moe.py", ""): "the same, in recomputation",
    ("transformers/models/qwen3_omni_moe/modeling_qwen3_omni_moe.py", ""): "the same, in recomputation",
    ("torch's backward", ""): "backward of rows that were picked by masks",
}
