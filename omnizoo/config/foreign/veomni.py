"""Rules for the keys of VeOmni: the nested keys of current versions, and the flat keys of earlier versions."""

from omnizoo.config.foreign.base import KEEP, Trainer, by_hand, copied, not_needed, unsupported
from omnizoo.config.foreign.hf_trainer import ATTENTION, NOT_SET

FREEZE = "model.modalities.NAME.encoder.freeze, or model.freeze with the names of the frozen modules"
IMAGE, VIDEO = "model.modalities.image.encoder.options", "model.modalities.video.encoder.options"
RULES = (
    copied("model.model_path", "model.path"),
    copied(
        "model.config_path",
        "model.config",
        "if model.path is not set, for random initialization",
        convert="unless_path",
    ),
    copied("model.tokenizer_path", "model.tokenizer"),
    copied(
        "model.attn_implementation model.ops_implementation.attn_implementation",
        "model.attention",
        "`auto` is the fastest exact kernel",
        {**ATTENTION, "*": None},
    ),
    not_needed(
        "model.moe_implementation model.ops_implementation.* train.ops_implementation.*",
        "kernels are chosen for the device",
    ),
    copied("model.lora_config.rank model.lora_config.lora_rank", "model.adapter.rank"),
    copied("model.lora_config.alpha model.lora_config.lora_alpha", "model.adapter.alpha"),
    copied("model.lora_config.dropout model.lora_config.lora_dropout", "model.adapter.dropout"),
    copied(
        "model.lora_config.lora_modules model.lora_config.target_modules", "model.adapter.targets", convert="targets"
    ),
    copied("model.lora_config.lora_adapter model.lora_config.adapter_path", "model.adapter.path", values=NOT_SET),
    copied("model.lora_config.use_rslora", "model.adapter.kind", "rslora", {"true": "rslora", "false": None}),
    copied("model.lora_config.use_dora", "model.adapter.kind", "dora", {"true": "dora", "false": None}),
    by_hand("model.lora_config.target_parameters", "model.adapter.targets: [experts.down_proj]"),
    by_hand("model.lora_config.share_expert_lora", "model.adapter (each expert has its own pair of matrices)"),
    unsupported(
        "model.lora_config.rank_pattern model.lora_config.alpha_pattern model.lora_config.bias "
        "model.lora_config.init_lora_weights"
    ),
    not_needed(
        "model.basic_modules model.safetensor_idx_path model.fqn_to_index_mapping model.model_type "
        "model.force_use_huggingface model.accelerator.*",
        "the recipe of the family names its blocks",
    ),
    by_hand(
        "model.encoders model.encoders.* model.decoders model.decoders.* model.encoder",
        "model.foundation and model.modalities.NAME.encoder",
    ),
    by_hand("model.input_encoder model.output_encoder model.encode_target", "model.modalities.NAME.encoder"),
    copied("data.train_path", "data.sources", "`[{path: ...}]`", convert="datasets"),
    copied("data.eval_path", "data.eval_sources", values=NOT_SET, convert="datasets"),
    copied(
        "data.source_name data.multisource_datasets_type data.enable_multisource",
        "data.sources",
        "one entry for each source",
        {"*": None},
    ),
    copied("data.train_size data.train_sample", "train.steps", "or train.epochs", {"*": None}),
    not_needed(
        "data.data_type data.datasets_type data.datasets_repeat data.dataloader_type data.dataloader.type "
        "data.data_tag data.level data.drop_last data.dataloader.drop_last data.pin_memory data.dataloader.pin_memory "
        "data.silent_exception data.split_nums data.predownload_factor data.dyn_bsz_buffer_size",
        "the schema of the rows is inferred, and packs are always full",
    ),
    copied("data.num_workers data.dataloader.num_workers", "data.workers"),
    copied("data.prefetch_factor data.dataloader.prefetch_factor", "data.prefetch"),
    copied("data.max_seq_len", "data.pack_tokens", "and data.overlong for longer samples"),
    copied(
        "data.chat_template", "data.chat_template", "default: the chat template of the tokenizer", convert="template"
    ),
    copied("data.text_keys data.text_key", "@text_field", "data.sources.N.columns: {text: ...}"),
    copied("data.shuffle data.dataloader.shuffle", "data.shuffle", values={"true": None, "false": False}),
    copied("data.seed", "train.seed"),
    copied("data.mm_configs.image_max_pixels", f"{IMAGE}.max_pixels"),
    copied("data.mm_configs.image_min_pixels", f"{IMAGE}.min_pixels"),
    copied("data.mm_configs.video_max_pixels", f"{VIDEO}.max_pixels"),
    copied("data.mm_configs.video_min_pixels", f"{VIDEO}.min_pixels"),
    copied("data.mm_configs.fps", f"{VIDEO}.fps"),
    copied("data.mm_configs.max_frames", f"{VIDEO}.max_frames"),
    copied("data.mm_configs.use_audio_in_video", f"{VIDEO}.use_audio_in_video", values={"true": True, "false": None}),
    unsupported(
        "data.mm_configs.video_total_pixels data.mm_configs.max_ratio data.mm_configs.min_frames",
        "model.modalities.video.encoder.options has max_pixels and max_frames",
    ),
    not_needed(
        "data.mm_configs.sample_rate data.mm_configs.scale_factor data.mm_configs.frame_factor",
        "the encoder of the family sets them",
    ),
    not_needed(
        "train.rmpad train.rmpad_with_pos_ids train.dyn_bsz train.dyn_bsz_margin train.dyn_bsz_buffer_size "
        "train.dyn_bsz_runtime train.pad_packed_input train.pad_packed_to_length train.use_background_tokenizer",
        "samples are always packed, with attention within each sample",
    ),
    unsupported("train.bsz_warmup_ratio train.bsz_warmup_init_mbtoken"),
    copied("train.global_batch_size", "train.packs_per_step", "or train.tokens_per_step"),
    copied("train.micro_batch_size", "train.micro_batch"),
    copied("train.num_train_epochs", "train.epochs"),
    copied("train.max_steps train.train_steps", "train.steps", values={**NOT_SET, "*": KEEP}),
    copied("train.lr train.optimizer.lr", "train.lr"),
    copied(
        "train.lr_min train.optimizer.lr_min", "@min_lr", "train.min_lr_ratio is the final learning rate / train.lr"
    ),
    copied("train.lr_start train.optimizer.lr_start", "train.warmup_steps", "warmup starts at zero", {"*": None}),
    copied(
        "train.lr_warmup_ratio train.optimizer.lr_warmup_ratio",
        "train.warmup_ratio",
        values={"0": None, "0.0": None, "*": KEEP},
    ),
    copied(
        "train.lr_decay_style train.optimizer.lr_decay_style",
        "train.schedule",
        values={"cosine": "cosine", "linear": "linear", "constant": "constant"},
    ),
    copied(
        "train.lr_decay_ratio train.optimizer.lr_decay_ratio",
        "train.schedule",
        "decay until the last step",
        {"1.0": None, "1": None},
    ),
    copied(
        "train.optimizer train.optimizer.type",
        "optimizer.kind",
        values={"adamw": None, "anyprecision_adamw": None, "muon": "muon"},
    ),
    copied("train.weight_decay train.optimizer.weight_decay", "optimizer.weight_decay"),
    copied(
        "train.no_decay_modules train.no_decay_params train.optimizer.no_decay_modules train.optimizer.no_decay_params",
        "optimizer.no_decay",
        "norm, bias and embedding",
        {"[]": None, **NOT_SET, "*": None},
    ),
    copied("train.beta1 train.optimizer.beta1", "optimizer.options.betas.0"),
    copied("train.beta2 train.optimizer.beta2", "optimizer.options.betas.1"),
    copied("train.optimizer.betas", "optimizer.options.betas"),
    copied("train.eps train.optimizer.eps", "optimizer.options.eps"),
    copied("train.max_grad_norm train.optimizer.max_grad_norm", "train.grad_clip"),
    copied("train.optimizer.muon_momentum", "optimizer.options.momentum"),
    copied("train.optimizer.muon_nesterov", "optimizer.options.nesterov"),
    copied("train.optimizer.muon_ns_steps", "optimizer.options.ns_steps"),
    copied("train.optimizer.muon_adjust_lr_fn", "optimizer.options.adjust_lr_fn"),
    by_hand("train.optimizer.muon_lr train.optimizer.muon_weight_decay", "optimizer.groups with `match` and `lr`"),
    not_needed("train.optimizer.muon_*", "Muon has no such options"),
    by_hand("train.vit_lr train.optimizer.vit_lr", "model.modalities.NAME.encoder.lr"),
    by_hand("train.freeze_vit train.freeze_vision_encoder train.freeze_audio_tower train.freeze_any_*", FREEZE),
    copied(
        "train.enable_mixed_precision train.mixed_precision.enable "
        "train.accelerator.fsdp_config.mixed_precision.enable",
        "train.precision",
        "bf16",
        {"true": "bf16", "false": "fp32"},
    ),
    not_needed(
        "train.accelerator.fsdp_config.mixed_precision.* train.mixed_precision.*",
        "train.precision: bf16 keeps fp32 master weights",
    ),
    copied(
        "train.enable_gradient_checkpointing train.gradient_checkpointing.enable",
        "parallel.recompute",
        "full",
        {"true": "full", "false": None},
    ),
    not_needed(
        "train.enable_reentrant train.gradient_checkpointing.enable_reentrant train.gradient_checkpointing.*",
        "recomputation is not reentrant",
    ),
    not_needed(
        "train.data_parallel_mode train.accelerator.fsdp_config.fsdp_mode train.accelerator.dp_size",
        "weights are sharded by FSDP2 (parallel.dp_shard)",
    ),
    copied(
        "train.data_parallel_replicate_size train.accelerator.dp_replicate_size",
        "parallel.dp_replicate",
        values={"-1": None, "*": KEEP},
    ),
    copied("train.data_parallel_shard_size train.accelerator.dp_shard_size", "parallel.dp_shard"),
    copied(
        "train.enable_full_shard train.accelerator.fsdp_config.full_shard "
        "train.accelerator.fsdp_config.reshard_after_forward",
        "parallel.reshard_after_forward",
    ),
    copied(
        "train.enable_fsdp_offload train.accelerator.fsdp_config.offload",
        "parallel.offload",
        "[parameters]",
        {"true": ["parameters"], "false": None},
    ),
    copied(
        "train.enable_activation_offload train.accelerator.offload_config.enable_activation "
        "train.offload_config.enable_activation",
        "parallel.offload",
        "[activations]",
        {"true": ["activations"], "false": None},
    ),
    not_needed(
        "train.activation_gpu_limit train.accelerator.offload_config.* train.offload_config.* "
        "train.enable_forward_prefetch train.accelerator.fsdp_config.*",
        "FSDP2 prefetches weights",
    ),
    copied("train.ulysses_parallel_size train.accelerator.ulysses_size", "parallel.ulysses"),
    copied("train.context_parallel_size train.accelerator.cp_size", "parallel.ring"),
    copied("train.expert_parallel_size train.accelerator.ep_size", "parallel.ep"),
    copied(
        "train.tensor_parallel_size train.pipeline_parallel_size train.accelerator.tp_size train.accelerator.pp_size",
        "parallel.ulysses",
        "for long packs, and parallel.ep for experts",
        {"1": None},
    ),
    not_needed(
        "train.async_enabled train.accelerator.enable_async train.ep_outside train.accelerator.ep_outside "
        "train.accelerator.*",
        "parallel.overlap overlaps communication",
    ),
    not_needed(
        "train.init_device train.broadcast_model_weights_from_rank0 train.enable_rank0_init train.empty_cache_steps "
        "train.gc_steps train.enable_manual_eager",
        "each rank reads its part of the weights",
    ),
    copied("train.seed", "train.seed"),
    unsupported("train.enable_full_determinism", "runs on CPUs are deterministic"),
    copied("train.use_compile train.enable_compile", "train.compile", values={"true": True, "false": None}),
    copied("train.output_dir train.checkpoint.output_dir", "log.dir"),
    copied(
        "train.save_steps train.checkpoint.save_steps",
        "checkpoint.every",
        "in steps",
        {"0": None, **NOT_SET, "*": KEEP},
    ),
    copied("train.save_epochs train.checkpoint.save_epochs", "checkpoint.every", "in steps", {"0": None, "*": None}),
    copied("train.eval_steps", "evaluation.every", values={"0": None, **NOT_SET, "*": KEEP}),
    copied("train.eval_epochs", "evaluation.every", "in steps", {"0": None, "*": None}),
    copied(
        "train.load_checkpoint_path train.checkpoint.load_path", "checkpoint.resume", values={"auto": None, **NOT_SET}
    ),
    not_needed(
        "train.ckpt_manager train.checkpoint.manager train.save_async train.checkpoint.save_async "
        "train.checkpoint.dcp_* train.load_checkpoint_ctx",
        "OmniZoo has one format of checkpoints",
    ),
    not_needed(
        "train.save_hf_weights train.checkpoint.save_hf_weights train.hf_weights_path train.save_initial_model "
        "train.checkpoint.hf_*",
        "`omnizoo export` writes a Hugging Face folder",
    ),
    copied("train.use_wandb train.wandb.enable", "@wandb", "log.wandb"),
    copied("train.wandb_project train.wandb.project", "@wandb_project", "log.wandb"),
    not_needed(
        "train.wandb_name train.wandb.name train.wandb.id train.wandb_id train.wandb.*", "log.dir names the run"
    ),
    by_hand("train.enable_profiling train.profile.enable train.profile_* train.profile.*", "log.profile: 10:12"),
    copied("train.log_steps train.logging_steps", "log.every"),
    by_hand("train.moe_load_balance_monitor_interval train.load_balance_loss_coef", "train.losses: [{kind: balance}]"),
)
TRAINER = Trainer(
    "veomni",
    "VeOmni",
    RULES,
    defaults={
        "train.lr": 5e-5,
        "train.schedule": "constant",
        "train.epochs": 1.0,
        "optimizer.weight_decay": 0.0,
        "optimizer.options.betas": [0.9, 0.999],
        "data.pack_tokens": 2048,
        "train.precision": "bf16",
        "parallel.recompute": "full",
    },
    command=r"train\.sh\s+tasks/|tasks/(?:\w+/)*train_\w+\.py|-m\s+veomni",
)
