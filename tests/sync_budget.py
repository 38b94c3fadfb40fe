"""Where the host may wait for the device in a training step, by file and function, and why. Anything else fails a test.

An entry that no dry run meets any more fails as well: take it out.
"""

ALLOWED = {
    ("omnizoo/parallel/experts.py", "split"): "how many rows go to and come from each rank sizes the all-to-all",
    (
        "omnizoo/training/step.py",
        "train_step",
    ): "loss and gradient norm: is the step finite, and what is logged",
    ("omnizoo/training/routers.py", "reduce"): "router statistics, once a step",
    ("omnizoo/training/forward.py", "localize"): "the slice of a pack goes to the device and back; it is known before",
    (
        "omnizoo/recipes/qwen_towers.py",
        "encode",
    ): "transformers' towers read sizes of items on the host",
    ("omnizoo/training/forward.py", "forward"): "transformers picks the places of media by masks",
    ("torch's backward", ""): "backward of rows that were picked by masks",
}
