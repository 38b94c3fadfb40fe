"""Configs in the style of other trainers, written for the tests. MODEL, ROWS and PAIRS stand for paths."""

import textwrap

LLAMA_FACTORY = """
model_name_or_path: MODEL
trust_remote_code: false
stage: sft
do_train: true
finetuning_type: full
dataset: ROWS
template: qwen3
cutoff_len: 96
overwrite_cache: true
preprocessing_num_workers: 4
output_dir: OUT
logging_steps: 1
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
num_train_epochs: 3.0
max_steps: 3
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""
LORA = "finetuning_type: lora\nlora_rank: 4\nlora_target: all"
SWIFT = r"""
NPROC_PER_NODE=2 \
CUDA_VISIBLE_DEVICES=0,1 \
swift sft \
    --model MODEL \
    --train_type full \
    --dataset ROWS \
    --torch_dtype float32 \
    --max_steps 3 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --learning_rate 1e-5 \
    --max_length 96 \
    --output_dir OUT \
    --eval_steps 50 \
    --save_steps 50 \
    --logging_steps 5 \
    --warmup_ratio 0.05 \
    --dataloader_num_workers 0 \
    EXTRA
"""
TRL = r"""
# comment
accelerate launch --num_processes 2 \
    trl/scripts/sft.py \
    --model_name_or_path MODEL \
    --dataset_name ROWS \
    --learning_rate 2.0e-4 \
    --max_steps 3 \
    --packing \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 2 \
    --max_length 96 \
    --eos_token '<|im_end|>' \
    --output_dir OUT \
    EXTRA
"""
TRL_YAML = """
model_name_or_path: MODEL
torch_dtype: float32
attn_implementation: sdpa
dataset_name: ROWS
dataset_text_field: text
learning_rate: 2.0e-5
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_length: 96
max_steps: 3
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
report_to: none
output_dir: OUT
"""
AXOLOTL = """
base_model: MODEL
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: false
datasets:
  - path: ROWS
    type: chat_template
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: OUT
sequence_len: 96
sample_packing: true
pad_to_sequence_len: true
wandb_project:
wandb_entity:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
max_steps: 3
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 2
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end|>"
"""
VEOMNI = """
model:
  model_path: MODEL
  ops_implementation:
    attn_implementation: flash_attention_2
    moe_implementation: eager
data:
  train_path: ROWS
  data_type: conversation
  chat_template: chatml
  max_seq_len: 96
  train_size: 80000000
  dataloader:
    type: native
    num_workers: 0
train:
  accelerator:
    ulysses_size: 1
    ep_size: 1
    fsdp_config:
      fsdp_mode: fsdp2
      full_shard: true
  gradient_checkpointing:
    enable: true
    enable_reentrant: false
  optimizer:
    type: adamw
    lr: 1.0e-5
    lr_min: 1.0e-6
    lr_decay_style: cosine
    lr_warmup_ratio: 0.1
    max_grad_norm: 1.0
    weight_decay: 0.1
  num_train_epochs: 2
  micro_batch_size: 1
  global_batch_size: 4
  max_steps: 3
  init_device: meta
  checkpoint:
    output_dir: OUT
    manager: dcp
    save_hf_weights: true
  wandb:
    enable: false
    project: sft
    name: first
"""
VEOMNI_FLAT = """
model:
  model_path: MODEL
  attn_implementation: flash_attention_2
  moe_implementation: fused
data:
  train_path: ROWS
  dataloader_type: native
  datasets_type: mapping
  data_type: conversation
  max_seq_len: 96
  drop_last: true
train:
  output_dir: OUT
  data_parallel_mode: fsdp2
  ulysses_parallel_size: 1
  expert_parallel_size: 1
  global_batch_size: 4
  micro_batch_size: 1
  rmpad: false
  rmpad_with_pos_ids: true
  optimizer: adamw
  lr: 3.0e-4
  lr_warmup_ratio: 0.1
  lr_decay_style: constant
  lr_decay_ratio: 1.0
  weight_decay: 0.01
  max_grad_norm: 1.0
  enable_mixed_precision: false
  enable_gradient_checkpointing: false
  enable_full_shard: true
  enable_fsdp_offload: false
  init_device: meta
  ckpt_manager: dcp
  load_checkpoint_path: ""
  max_steps: 3
  save_steps: 100
  use_wandb: false
  wandb_project: sft
"""


def lines(text: str, *changes: str) -> str:
    """Replace the lines of a YAML text with flat keys that `changes` set, and add the others."""
    result = text.strip().splitlines()
    for change in "\n".join(changes).splitlines():
        key = change.partition(":")[0]
        result = [line for line in result if line.partition(":")[0] != key]
        result.append(change)
    return "\n".join(result) + "\n"


def nested(text: str, section: str, addition: str) -> str:
    """Add lines below a top-level section of a YAML text."""
    return text.replace(f"\n{section}:\n", f"\n{section}:\n{textwrap.indent(addition, '  ')}\n", 1)


def shell(text: str, extra: str = "", **changes: str) -> str:
    """Change options of a command line, and add others."""
    for name, value in changes.items():
        kept = [line for line in text.splitlines() if not line.strip().startswith(f"--{name} ")]
        text = "\n".join(kept).replace("EXTRA", f"--{name} {value} \\\n    EXTRA")
    return text.replace("EXTRA", extra).rstrip().rstrip("\\") + "\n"


# trainer -> name with suffix -> text; 12 of each trainer. The first one is trained in the fast tests.
CONFIGS: dict[str, dict[str, str]] = {
    "llama-factory": {
        "lora.yaml": lines(LLAMA_FACTORY, LORA, "val_size: 0.1\neval_strategy: steps\neval_steps: 500"),
        "full.yaml": LLAMA_FACTORY,
        "qlora.yaml": lines(LLAMA_FACTORY, LORA, "quantization_bit: 4\nlora_dropout: 0.05\nlora_alpha: 8"),
        "deepspeed.yaml": lines(LLAMA_FACTORY, "deepspeed: examples/deepspeed/ds_z3_config.json\nreport_to: none"),
        "pretrain.yaml": lines(LLAMA_FACTORY, "stage: pt\npacking: true\nlr_scheduler_type: linear"),
        "dpo.yaml": lines(LLAMA_FACTORY, LORA, "stage: dpo\npref_beta: 0.1\npref_loss: sigmoid\ndataset: PAIRS"),
        "simpo.yaml": lines(LLAMA_FACTORY, "stage: dpo\npref_loss: simpo\nsimpo_gamma: 0.5\ndataset: PAIRS"),
        "orpo.yaml": lines(LLAMA_FACTORY, "stage: dpo\npref_loss: orpo\npref_beta: 0.2\ndataset: PAIRS"),
        "muon.yaml": lines(LLAMA_FACTORY, "use_muon: true\nneat_packing: true\nflash_attn: fa2"),
        "args.json": '{"model_name_or_path": "MODEL", "stage": "sft", "dataset": "ROWS", "cutoff_len": 96, '
        '"finetuning_type": "full", "template": "default", "max_steps": 3, "output_dir": "OUT", "bf16": false}',
        "command.sh": "llamafactory-cli train --stage sft --model_name_or_path MODEL --dataset ROWS --template qwen "
        "--finetuning_type lora --lora_target q_proj,v_proj --cutoff_len 96 --max_steps 3 --output_dir OUT\n",
        "unknown.yaml": lines(LLAMA_FACTORY, "no_such_key: 3\nuse_galore: true\nmax_samples: 1000\nfp16: true"),
    },
    "ms-swift": {
        "lora.sh": shell(SWIFT, "--lora_rank 4 --lora_alpha 8 --target_modules all-linear", train_type="lora"),
        "full.sh": shell(SWIFT),
        "zero3.sh": shell(SWIFT, "--deepspeed zero3 --attn_impl flash_attn --packing true --padding_free true"),
        "dpo.sh": shell(SWIFT, "--rlhf_type dpo --beta 0.2 --rpo_alpha 0.1", dataset="PAIRS").replace("sft", "rlhf"),
        "orpo.sh": shell(SWIFT, "--rlhf_type orpo", dataset="PAIRS").replace("sft", "rlhf"),
        "split.sh": shell(SWIFT, "--split_dataset_ratio 0.05 --acc_strategy token --strict false"),
        "sequence.sh": shell(SWIFT, "--sequence_parallel_size 1 --truncation_strategy delete"),
        "pretrain.sh": shell(SWIFT, "--streaming true --lr_scheduler_type cosine").replace("sft", "pt"),
        "media.sh": "MAX_PIXELS=50176 " + shell(SWIFT, "--freeze_vit true --vit_lr 1e-5").strip() + "\n",
        "args.yaml": "model: MODEL\ntrain_type: full\ndataset: [ROWS]\nmax_length: 96\nmax_steps: 3\noutput_dir: OUT\n"
        "torch_dtype: float32\nper_device_train_batch_size: 2\nfreeze_llm: false\n",
        "args.json": '{"model": "MODEL", "train_type": "lora", "dataset": ["ROWS#500"], "max_length": 96, '
        '"max_steps": 3, "output_dir": "OUT", "target_modules": ["q_proj"], "loss_scale": "default"}',
        "unknown.sh": shell(SWIFT, "--no_such_option 3 --tensor_model_parallel_size 2 --system 'Be brief.'"),
    },
    "trl": {
        "sft.sh": shell(TRL),
        "sft.yaml": TRL_YAML,
        "lora.sh": shell(TRL, "--use_peft --lora_r 4 --lora_alpha 8 --lora_target_modules all-linear"),
        "qlora.sh": shell(TRL, "--use_peft --load_in_4bit --lora_target_modules q_proj v_proj"),
        "dpo.sh": "trl dpo --model_name_or_path MODEL --dataset_name PAIRS --beta 0.1 --loss_type sigmoid "
        "--max_length 96 --max_steps 3 --output_dir OUT --precompute_ref_log_probs\n",
        "dpo.yaml": lines(TRL_YAML, "dataset_name: PAIRS\nbeta: 0.1\nmax_prompt_length: 64"),
        "kto.sh": "trl kto --model_name_or_path MODEL --dataset_name PAIRS --beta 0.2 --desirable_weight 1.5 "
        "--max_length 96 --max_steps 3 --output_dir OUT --use_peft\n",
        "evaluation.yaml": lines(TRL_YAML, "eval_strategy: steps\neval_steps: 100\ndataset_test_split: train"),
        "assistant.yaml": lines(TRL_YAML, "assistant_only_loss: true\npacking: true\npadding_free: true\nbf16: false"),
        "sources.yaml": lines(TRL_YAML, "use_liger_kernel: true\noptim: adafactor\nneftune_noise_alpha: 5"),
        "args.json": '{"model_name_or_path": "MODEL", "dataset_name": "ROWS", "max_length": 96, "max_steps": 3, '
        '"output_dir": "OUT", "packing": true, "completion_only_loss": true, "bf16": false}',
        "unknown.sh": shell(TRL, "--no_such_option 3 --push_to_hub --neftune_noise_alpha 5"),
    },
    "axolotl": {
        "full.yaml": AXOLOTL,
        "lora.yaml": lines(AXOLOTL, "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_linear: true"),
        "qlora.yaml": lines(
            AXOLOTL, "adapter: qlora\nload_in_4bit: true\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]"
        ),
        "pretrain.yaml": AXOLOTL.replace("type: chat_template", "type: completion"),
        "dpo.yaml": lines(AXOLOTL, "rl: dpo\nrl_beta: 0.2").replace("ROWS", "PAIRS"),
        "orpo.yaml": lines(AXOLOTL, "rl: orpo\norpo_alpha: 0.1").replace("ROWS", "PAIRS"),
        "kto.yaml": lines(AXOLOTL, "rl: kto\nkto_desirable_weight: 1.5").replace("ROWS", "PAIRS"),
        "fsdp.yaml": lines(AXOLOTL, "fsdp_version: 2\nval_set_size: 0\nliger_rope: true\nsequence_parallel_degree: 1"),
        "template.yaml": lines(AXOLOTL, "chat_template: chatml\nexcess_length_strategy: truncate\noptimizer: muon"),
        "offload.yaml": lines(AXOLOTL, "activation_offloading: true\ncosine_min_lr_ratio: 0.2\nseed: 7"),
        "files.yaml": AXOLOTL.replace("- path: ROWS", "- path: json\n    data_files: [ROWS]\n    ds_type: json"),
        "unknown.yaml": lines(AXOLOTL, "no_such_key: 3\nrelora: true\nnoisy_embedding_alpha: 5\nlr_groups: []"),
    },
    "veomni": {
        "nested.yaml": VEOMNI,
        "flat.yaml": VEOMNI_FLAT,
        "lora.yaml": nested(
            VEOMNI,
            "model",
            "lora_config:\n  rank: 4\n  alpha: 8\n  lora_modules: [q_proj, v_proj]\n  use_rslora: false",
        ),
        "expert_lora.yaml": nested(
            VEOMNI, "model", "lora_config:\n  rank: 4\n  share_expert_lora: true\n  rank_pattern: {q_proj: 8}"
        ),
        "muon.yaml": VEOMNI.replace("type: adamw", "type: muon\n    muon_lr: 1.0e-4\n    muon_momentum: 0.95"),
        "media.yaml": nested(VEOMNI, "data", "mm_configs:\n  use_audio_in_video: false\n  video_total_pixels: 2889523"),
        "frozen.yaml": nested(VEOMNI, "train", "freeze_vit: true\nvit_lr: 1.0e-6\nsave_steps: 100"),
        "pretrain.yaml": VEOMNI_FLAT.replace("data_type: conversation", "data_type: plaintext\n  text_keys: text"),
        "offload.yaml": VEOMNI_FLAT.replace("enable_fsdp_offload: false", "enable_activation_offload: true"),
        "wandb.yaml": VEOMNI_FLAT.replace("use_wandb: false", "enable_profiling: true\n  use_wandb: false"),
        "warmup.yaml": nested(VEOMNI_FLAT, "train", "bsz_warmup_ratio: 0.1\ndyn_bsz_margin: 0\nseed: 3"),
        "unknown.yaml": nested(VEOMNI, "train", "no_such_key: 3\naccelerator_v2: {kind: new}\ntensor_parallel_size: 2"),
    },
}
