"""Config keys of earlier versions and of other trainers, with our replacements.

Such a key is an error, and the error message names the replacement. The other trainers are LLaMA-Factory, ms-swift,
TRL, the Hugging Face Trainer and VeOmni.
"""

from fnmatch import fnmatchcase

# Maps each key of an earlier version to its current key.
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
NOT_YET = "not supported yet"
NO_KEY = "no key is needed"

# Maps a replacement to the names of keys in other trainers, separated by spaces. A replacement is our key, `NO_KEY`
# with a reason, or `NOT_YET` with the closest alternative. A name may be a glob pattern.
REPLACEMENTS = {
    # model
    "model.path": "model_name_or_path model_id_or_path model_path base_model",
    "model.tokenizer": "tokenizer_name tokenizer_path",
    "model.attention": "attn_implementation",
    "model.attention (`auto`: the fastest exact kernel of the device)": "flash_attn attn_impl",
    "checkpoint.resume": "resume_from_checkpoint",
    "model.adapter.path": "adapter_name_or_path",
    "model.adapter (`{kind: lora}`); all weights are trained if it is not set": (
        "finetuning_type train_type tuner_type sft_type"
    ),
    "model.adapter": "use_peft",
    "model.adapter.rank": "lora_rank lora_r",
    "model.adapter.alpha": "lora_alpha",
    "model.adapter.dropout": "lora_dropout",
    "model.adapter.targets": "lora_target lora_target_modules target_modules",
    "model.adapter.modules_to_save": "additional_target",
    "model.adapter.kind: dora": "use_dora",
    "model.adapter.kind: rslora": "use_rslora",
    "model.adapter.base (nf4 or int8)": "quantization_bit quant_bits",
    "model.adapter.base: nf4": "load_in_4bit",
    "model.adapter.base: int8": "load_in_8bit",
    "model.freeze with glob patterns of the frozen layers": "freeze_trainable_layers",
    "model.freeze with the names of the frozen modules": "freeze_*",
    "model.modalities.NAME.encoder.options.max_pixels": "*_max_pixels max_pixels",
    "data.sources.N.media_dir for a folder of media": "*_folder",
    # data
    "data.sources: [{path: ...}]": "dataset dataset_name",
    "data.sources.N.path": "dataset_dir train_path train_file",
    "data.sources.N.columns and data.sources.N.format": "dataset_info",
    "data.eval_sources": "val_dataset eval_dataset",
    f"{NOT_YET}; use `take: every 50th` in data.eval_sources": "val_size split_dataset_ratio",
    "data.sources.N.media_dir": "media_dir",
    "data.sources.N.weight": "interleave_probs mix_strategy",
    "data.chat_template with a Jinja file; default: the chat template of the tokenizer": ("template chat_template"),
    "data.template_options": "chat_template_kwargs enable_thinking",
    "data.pack_tokens, and data.overlong for longer samples": (
        "cutoff_len max_length max_seq_length max_seq_len model_max_length"
    ),
    "data.overlong": "truncation_strategy",
    "data.overlong: truncate, which removes the end of a sample": "truncation_side",
    f"{NO_KEY}: samples are always packed, with attention within each sample": "packing neat_packing",
    f"{NO_KEY}: samples are always packed, without padding": "padding_free",
    f"{NO_KEY}: packs are filled by length": "group_by_length",
    "`loss: true` in the messages of a row": "train_on_prompt",
    f"{NO_KEY}: only responses are targets (`loss: true` in a message adds others)": (
        "completion_only_loss assistant_only_loss"
    ),
    "`loss: false` in the earlier messages of a row": "mask_history",
    "data.sources.N.columns: {text: ...}": "dataset_text_field",
    f"{NOT_YET}; use train.steps to end a run early": "max_samples",
    f"{NO_KEY}: rows are always read from the files during the run": "streaming",
    "data.workers": "preprocessing_num_workers dataset_num_proc dataloader_num_workers",
    "data.prefetch": "dataloader_prefetch_factor",
    # training
    "train.epochs": "num_train_epochs num_epochs",
    "train.steps": "max_steps train_steps",
    "train.micro_batch (packs per rank), or train.tokens_per_step for all ranks": "per_device_train_batch_size",
    "train.micro_batch (packs per rank)": "micro_batch_size",
    "evaluation.packs": "per_device_eval_batch_size",
    "train.packs_per_step or train.tokens_per_step": "train_batch_size global_batch_size",
    "train.packs_per_step or train.tokens_per_step; gradients are accumulated over micro-batches": (
        "gradient_accumulation_steps"
    ),
    "train.lr": "learning_rate",
    "train.schedule": "lr_scheduler_type lr_decay_style",
    "train.warmup_ratio": "lr_warmup_ratio warmup_ratio",
    "train.warmup_steps": "warmup_steps",
    "train.min_lr_ratio (final learning rate / peak)": "min_lr lr_min",
    "train.grad_clip": "max_grad_norm",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.options.betas": "adam_beta1 adam_beta2",
    "optimizer.options.eps": "adam_epsilon",
    "optimizer.kind": "optim",
    "optimizer.kind: muon": "use_muon",
    "model.modalities.NAME.encoder.lr": "vit_lr",
    "model.modalities.NAME.projector.lr": "aligner_lr",
    "train.losses ([{kind: dpo}] for preferences)": "stage rlhf_type pref_loss",
    "train.losses.N.options.beta": "pref_beta beta",
    "train.losses.N.options (docs/how-to/plugins.md)": "label_smoothing_factor",
    NOT_YET: "neftune_noise_alpha pipeline_model_parallel_size save_only_model",
    f"{NO_KEY}: `omnizoo train` trains": "do_train",
    "evaluation.every and data.eval_sources": "do_eval",
    "evaluation.every": "eval_strategy evaluation_strategy eval_steps",
    "checkpoint.best": "metric_for_best_model load_best_model_at_end",
    "evaluation.early_stop.patience": "early_stopping_patience",
    # precision and layout
    "train.precision: bf16": "bf16",
    f"{NOT_YET}; use train.precision: bf16, fp32 or fp64": "fp16",
    f"{NO_KEY}: bf16 runs use tensor cores": "tf32",
    "train.precision": "torch_dtype",
    f"{NOT_YET}; use train.precision: bf16, which keeps fp32 master weights": "pure_bf16",
    "parallel.recompute: full": "gradient_checkpointing enable_gradient_checkpointing",
    "parallel.recompute: none": "disable_gradient_checkpointing",
    "parallel.dp_shard (FSDP2 instead of ZeRO-3)": "deepspeed",
    "parallel.dp_shard": "fsdp fsdp_config data_parallel_mode",
    "parallel.ulysses or parallel.ring": "sequence_parallel_size",
    "parallel.ulysses": "ulysses_parallel_size ulysses_size",
    "parallel.ring": "context_parallel_size",
    "parallel.ep": "expert_parallel_size ep_size",
    f"{NOT_YET}; use parallel.ulysses for long packs and parallel.ep for experts": (
        "tensor_parallel_size tensor_model_parallel_size"
    ),
    f"{NO_KEY}: the launcher stops the run when a rank ends": "ddp_timeout",
    f"{NO_KEY}: kernels are chosen for the device (`omnizoo doctor` lists them)": (
        "use_liger_kernel enable_liger_kernel"
    ),
    "train.compile": "torch_compile",
    # output
    "log.dir": "output_dir run_name logging_dir",
    "checkpoint.resume: never": "overwrite_output_dir",
    "log.every": "logging_steps",
    "log.wandb and log.tensorboard": "report_to",
    "log.wandb": "use_wandb wandb_project",
    f"{NO_KEY}: report.html in log.dir contains the loss curves": "plot_loss",
    "checkpoint.every": "save_steps save_strategy",
    "checkpoint.every, in steps": "save_epochs",
    "checkpoint.keep": "save_total_limit",
    f"{NOT_YET}; upload the folder that `omnizoo export` writes": "push_to_hub",
}
OUR_KEYS = {name: replacement for replacement, names in REPLACEMENTS.items() for name in names.split()}


def our_key(name: str) -> str | None:
    """Return advice for the key of another trainer, to be appended to "... is not a key; "; None for unknown keys."""
    plain = name.lower().replace("-", "_")
    matches = (text for pattern, text in OUR_KEYS.items() if fnmatchcase(plain, pattern))
    replacement = next(matches, None)
    if replacement is None or replacement.startswith((NOT_YET, NO_KEY)):
        return replacement
    return f"use {replacement}"


def moved_key(key: str) -> str | None:
    """Return the message "... is now ..." for a key of an earlier version; None for other keys.

    `key` may also be inside a moved key, or a section that no longer exists, such as `router`.
    """
    for old, new in MOVED_KEYS.items():
        if f"{key}.".startswith(f"{old}."):
            return f"{key} is now {new}{key.removeprefix(old)}"
        if old.startswith(f"{key}."):
            return f"{old} is now {new}"
    return None
