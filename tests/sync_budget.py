"""Where the host may wait for the device in a training step, by file and function, and why. Anything else fails a test.

An entry that no dry run meets any more fails as well: take it out.
"""

ALLOWED = {
    ("omnizoo/parallel/experts.py", "split"): "how many rows go to and come from each rank sizes the all-to-all",
    ("omnizoo/training/step.py", "train_step"): "loss and gradient norm: is the step finite, and what is logged",
    # Copies of what the host knew before the step. They go once data are moved a step ahead.
    ("omnizoo/training/forward.py", "localize"): "the inputs of a micro-batch; where ranks share packs, an index back",
    ("omnizoo/parallel/sequence.py", "__init__"): "which tokens are this rank's, and where samples begin",
    ("omnizoo/ops/attention_blocks.py", "_cumulative"): "where blocks of a ring begin, once a micro-batch",
    ("omnizoo/models/media_batch.py", "place"): "media items",
    ("omnizoo/parallel/route.py", "deliver"): "where features of media go",
    ("omnizoo/parallel/route.py", "_at"): "which of those that arrive have a token here, or one before it",
    # Only where no kernel takes the boundaries of samples: fp32, fp64, attention dropout.
    ("omnizoo/ops/attention.py", "lengths"): "attention sample by sample",
}
