"""Rules for the keys of axolotl."""

from omnizoo.config.foreign.base import Trainer, by_hand, copied, not_needed, unsupported
from omnizoo.config.foreign.hf_trainer import LORA, NOT_SET, TRAINING_ARGUMENTS

RULES = (
    copied("base_model", "model.path"),
    copied("base_model_config", "model.config", "model.path contains the config", {"*": None}),
    copied("tokenizer_config", "model.tokenizer"),
    not_needed(
        "model_type tokenizer_type processor_type is_llama_derived_model is_mistral_derived_model tokenizer_use_fast",
        "the classes are read from config.json",
    ),
    copied("revision_of_model", "model.path", "as `ORG/NAME@REVISION`", {"*": None}),
    copied(
        "adapter",
        "model.adapter",
        "all weights are trained without it",
        {"lora": {}, "qlora": {"base": "nf4"}, **NOT_SET, "*": None},
    ),
    copied("lora_model_dir", "model.adapter.path", values=NOT_SET),
    copied("lora_target_modules", "model.adapter.targets", convert="targets"),
    copied("lora_target_linear", "model.adapter.targets", "all-linear", {"true": ["all-linear"], "false": None}),
    copied("lora_modules_to_save", "model.adapter.modules_to_save", convert="list"),
    copied("peft_use_dora", "model.adapter.kind", "dora", {"true": "dora", "false": None}),
    copied("peft_use_rslora", "model.adapter.kind", "rslora", {"true": "rslora", "false": None}),
    unsupported("lora_target_parameters", "use model.adapter.targets: [experts.down_proj]"),
    not_needed(
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_fan_in_fan_out lora_on_cpu",
        "kernels are chosen for the device",
    ),
    by_hand("unfrozen_parameters", "model.freeze with the names of the frozen modules"),
    copied("datasets", "data.sources", "`[{path: ...}]`", convert="datasets"),
    copied("test_datasets", "data.eval_sources", convert="datasets"),
    copied("pretraining_dataset", "data.sources", convert="datasets"),
    copied("val_set_size", "@val_size", "`take: every 50th` in data.eval_sources"),
    not_needed(
        "dataset_prepared_path dataset_processes dataset_keep_in_memory shuffle_merged_datasets "
        "dataset_exact_deduplication streaming",
        "rows are always read from the files during the run",
    ),
    copied("sequence_len", "data.pack_tokens", "and data.overlong for longer samples"),
    copied("excess_length_strategy", "data.overlong", values={"drop": "drop", "truncate": "truncate"}),
    not_needed(
        "sample_packing eval_sample_packing multipack_real_batches batch_flattening sample_packing_*",
        "samples are always packed, with attention within each sample",
    ),
    not_needed("pad_to_sequence_len pad_to_multiple_of", "samples are always packed, without padding"),
    not_needed("sample_packing_eff_est total_num_tokens", "packs are counted before the run"),
    copied("train_on_inputs", "data.sources", "`loss: true` in the messages of a row", {"false": None, **NOT_SET}),
    copied("chat_template", "data.chat_template", "default: the chat template of the tokenizer", convert="template"),
    copied("chat_template_jinja", "data.chat_template", "a file with this template", {"*": None, **NOT_SET}),
    copied(
        "default_system_message", "data.template_options", "or a system message in each row", {"*": None, **NOT_SET}
    ),
    by_hand(
        "special_tokens* tokens added_tokens_overrides*", "a tokenizer folder with these tokens as model.tokenizer"
    ),
    copied("resize_token_embeddings_to_32x", "model.resize_vocabulary", values={"true": True, "false": None}),
    copied(
        "rl",
        "train.losses",
        "a loss for preferences",
        {
            "dpo": [{"kind": "dpo"}],
            "ipo": [{"kind": "dpo", "options": {"loss": "ipo"}}],
            "kto": [{"kind": "kto"}],
            "orpo": [{"kind": "orpo"}],
            "simpo": [{"kind": "simpo"}],
            **NOT_SET,
            "*": None,
        },
    ),
    copied("rl_beta dpo_beta orpo_alpha", "train.losses.0.options.beta"),
    copied("simpo_gamma", "train.losses.0.options.gamma"),
    copied("kto_desirable_weight", "train.losses.0.options.desirable_weight"),
    copied("kto_undesirable_weight", "train.losses.0.options.undesirable_weight"),
    copied("num_epochs", "train.epochs"),
    copied("micro_batch_size", "@micro_batch", "train.micro_batch and train.packs_per_step"),
    copied("batch_size", "@batch", "train.packs_per_step (packs of all ranks)"),
    not_needed("eval_batch_size auto_find_batch_size", "evaluation.packs is the size of an evaluation"),
    copied(
        "optimizer",
        "optimizer.kind",
        values={
            "adamw_torch": None,
            "adamw_torch_fused": None,
            "adamw_hf": None,
            "adafactor": "adafactor",
            "adamw_8bit": "adamw_8bit",
            "adamw_bnb_8bit": "adamw_8bit",
            "paged_adamw_8bit": "adamw_8bit",
            "muon": "muon",
        },
    ),
    copied("cosine_min_lr_ratio", "train.min_lr_ratio"),
    by_hand("embedding_lr embedding_lr_scale lr_groups", "optimizer.groups with `match` and `lr`"),
    unsupported(
        "optim_args optim_target_modules loraplus_lr_ratio relora* cosine_constant_lr_ratio noisy_embedding_alpha"
    ),
    copied(
        "flash_attention xformers_attention sdp_attention flex_attention s2_attention eager_attention",
        "model.attention",
        "`auto` is the fastest exact kernel",
        {"true": None, "false": None},
    ),
    not_needed("flash_attn_* liger_* cut_cross_entropy plugins*", "kernels are chosen for the device"),
    copied("gradient_checkpointing_legacy", "parallel.recompute", "full", {"true": "full", "false": None}),
    copied("activation_offloading", "parallel.offload", "[activations]", {"true": ["activations"], "false": None}),
    copied("saves_per_epoch evals_per_epoch", "checkpoint.every", "in steps", {"*": None}),
    not_needed(
        "save_first_step save_only_last strict gpu_memory_limit device_map max_memory", "the launcher sets them"
    ),
    copied("resume_from_checkpoint", "checkpoint.resume", values={"true": None, "false": None, **NOT_SET}),
    not_needed("auto_resume_from_checkpoints", "runs always resume"),
    copied("wandb_project", "log.wandb", values=NOT_SET),
    not_needed(
        "wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id mlflow_* comet_* use_tensorboard",
        "log.dir names the run",
    ),
    copied("sequence_parallel_degree context_parallel_size", "parallel.ring", "or parallel.ulysses"),
    not_needed("heads_k_stride ring_attn_func", "the layout of ring attention is chosen"),
    copied("expert_parallel_size", "parallel.ep"),
    copied("dp_shard_size", "parallel.dp_shard"),
    copied("dp_replicate_size", "parallel.dp_replicate"),
    unsupported("tensor_parallel_size", "use parallel.ulysses for long packs and parallel.ep for experts"),
    copied("load_in_4bit", "model.adapter.base", "nf4", {"true": "nf4", "false": None}),
    copied("load_in_8bit", "model.adapter.base", "int8", {"true": "int8", "false": None}),
    copied("bf16 bfloat16", "train.precision", "bf16", {"true": "bf16", "auto": "bf16", "full": "bf16", "false": None}),
    copied("fp16 float16", "train.precision", "bf16, fp32 or fp64", {"false": None, **NOT_SET, "*": None}),
    not_needed("ddp_* fsdp_version fsdp_final_state_dict_type", "weights are sharded by FSDP2 (parallel.dp_shard)"),
    copied("image_size", "model.modalities.image.encoder.options.max_pixels", "in pixels", {"*": None}),
    not_needed("debug logging_dir profiler_steps hf_use_auth_token", "log.profile profiles steps"),
    *LORA,
    *TRAINING_ARGUMENTS,
)
TRAINER = Trainer(
    "axolotl",
    "axolotl",
    RULES,
    defaults={
        "train.schedule": "cosine",
        "train.min_lr_ratio": 0.0,
        "train.epochs": 1.0,
        "optimizer.weight_decay": 0.0,
        "optimizer.options.betas": [0.9, 0.999],
        "data.pack_tokens": 512,
    },
    command=r"axolotl\s+train|axolotl\.cli\.train",
)
