"""Keys of earlier versions and their replacements. Using such a key is an error.

Keys of other trainers are in `omnizoo.config.foreign`.
"""

# Maps keys of earlier versions to current keys.
MOVED_KEYS = {
    "train.betas": "optimizer.options.betas",
    "train.eps": "optimizer.options.eps",
    "train.weight_decay": "optimizer.weight_decay",
    "train.no_decay": "optimizer.no_decay",
    "train.balance_loss": "train.losses: [{kind: cross_entropy}, {kind: balance, weight: ...}]",
    "train.router_z_loss": "train.losses: [{kind: cross_entropy}, {kind: router_z, weight: ...}]",
    "train.global_batch": "train.packs_per_step",
    "train.batch_tokens": "train.tokens_per_step",
    "train.eval_every": "evaluation.every",
    "train.eval_packs": "evaluation.packs",
    "train.early_stop": "evaluation.early_stop",
    "router.bias_rate": "train.router_bias_rate",
    "parallel.precision": "train.precision",
}


def moved_key(key: str) -> str | None:
    """Return a sentence with the new name of a key from an earlier version; None for other keys.

    It also accepts keys below a moved key, and sections that contained only moved keys, such as `router`.
    """
    for old, new in MOVED_KEYS.items():
        if f"{key}.".startswith(f"{old}."):
            return f"{key} is now {new}{key.removeprefix(old)}"
        if old.startswith(f"{key}."):
            return f"{old} is now {new}"
    return None
