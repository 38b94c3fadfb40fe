"""Build the optimizer of a model from the section `optimizer` of the config.

Each parameter is assigned an optimizer class, a learning rate and a weight decay.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.config.errors import UserError, named_line
from omnizoo.config.plugins import CODE_ERRORS, check_call, keyword_parameters, resolve_class
from omnizoo.config.schema import Config
from omnizoo.config.sections.built_in_options import to_tuple
from omnizoo.config.sections.optimizer import EmaSettings
from omnizoo.models.component_settings import ComponentSettings
from omnizoo.models.hf_private import is_experts, routers
from omnizoo.ops.memory.offload import OffloadedState
from omnizoo.ops.torch_private import is_fake
from omnizoo.parallel.fsdp.sharded_tensors import is_sharded, local_shard
from omnizoo.training.optimizers.adamw import ShardAdamW

BETAS = {"betas": (0.9, 0.95), "eps": 1e-8}
BF16 = "adamw_bf16"  # `adamw` with `optimizer.moments: bf16`; not a kind that the config can set
TALKING = ("muon", "adafactor")  # optimizers whose update needs collectives
EXPECTED = "a torch.optim.Optimizer: Class(params, lr, weight_decay, **options)"


@dataclass(frozen=True)
class OptimizerKind:
    target: str
    defaults: Mapping[str, Any]
    package: str | None = None  # required package


KINDS = {
    "adamw": OptimizerKind("omnizoo.training.optimizers.adamw:ShardAdamW", BETAS | {"fused": True}),
    "muon": OptimizerKind("omnizoo.training.optimizers.muon:Muon", {}),
    "adafactor": OptimizerKind("omnizoo.training.optimizers.adafactor:Adafactor", {}),
    "adamw_8bit": OptimizerKind("omnizoo.training.optimizers.adamw_8bit:AdamW8bit", BETAS, package="torchao"),
    BF16: OptimizerKind("omnizoo.training.optimizers.adamw_bf16:AdamWBf16", BETAS),
}


@dataclass(frozen=True)
class Choice:
    """The class and the arguments of an optimizer."""

    kind: str
    options: str  # JSON, so that equal options compare and hash as equal
    key: str  # config key, for messages

    @property
    def arguments(self) -> dict[str, Any]:
        defaults = KINDS[self.kind].defaults if self.kind in KINDS else {}
        return {**defaults, **{name: to_tuple(value) for name, value in json.loads(self.options).items()}}


class OptimizerGroup(torch.optim.Optimizer):
    """Several optimizers as one, with a moving average of the weights and optional CPU offload of the state.

    Parameter groups and state are shared with the optimizers in `parts`, so schedules and checkpoints treat the group
    like a single optimizer.
    """

    def __init__(
        self,
        parts: Sequence[torch.optim.Optimizer],
        average: dict[nn.Parameter, torch.Tensor],
        offloaded_state: OffloadedState | None = None,
    ) -> None:
        self.parts, self.average, self.offloaded_state = parts, average, offloaded_state
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.state.update(part.state)
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def check_optimizer(config: Config) -> None:
    """Check kinds and options of the optimizer, before anything is loaded.

    Raises:
        UserError: If a kind or an option is invalid, or cannot be combined with `parallel.offload`.
    """
    for choice in _choices(config):
        _class_of(choice)
        if "parameters" in config.parallel.offload and choice.kind in TALKING:
            raise UserError(
                f"parallel.offload: `parameters` are updated on the host, and {choice.kind} ({choice.key}.kind) has "
                "ranks talk to each other in an update, which takes their devices; offload `optimizer` instead, or "
                "use adamw or adamw_8bit"
            )


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Build the optimizer of a model.

    Args:
        model: The model, sharded. Only parameters with `requires_grad` are updated.
        config: The config of the run.

    Returns:
        The optimizer. Each of its parameter groups has a `rate`: its learning rate relative to `train.lr`.

    Raises:
        UserError: If a kind or an option of the optimizer is invalid.
    """
    check_optimizer(config)
    names = {parameter: name for name, parameter in model.named_parameters()}
    members = _assign_parameters(model, config)
    parts = [_build(choice, groups, config, names) for choice, groups in members.items()]
    offload = config.parallel.offload
    # With offloaded parameters, the optimizer state is always on the CPU.
    is_offloaded = "optimizer" in offload and "parameters" not in offload
    if len(parts) == 1 and config.optimizer.ema is None and not is_offloaded:
        return parts[0]
    state = None
    if is_offloaded:
        device = next(parameter.device for parameter in model.parameters() if parameter.requires_grad)
        state = OffloadedState(device, ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return OptimizerGroup(parts, _average_of(parts) if config.optimizer.ema else {}, state)


def _assign_parameters(
    model: nn.Module, config: Config
) -> dict[Choice, dict[tuple[float, float, bool], list[nn.Parameter]]]:
    """Return the trained parameters, grouped by optimizer, then by (weight decay, relative rate, is sharded)."""
    run, train = config.optimizer, config.train
    treatments = ComponentSettings(model, config.model, run.groups)
    default, *others = _choices(config)
    chosen = {id(group): choice for group, choice in zip(run.groups, others, strict=True)}
    spared = {parameter for kind in run.no_decay for parameter in _parameters_of(kind, model)}
    hidden = hidden_matrices(model) if any(choice.kind == "muon" for choice in (default, *others)) else set()
    members: dict[Choice, dict[tuple[float, float, bool], list[nn.Parameter]]] = defaultdict(lambda: defaultdict(list))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group = treatments.groups.get(name)
        choice = chosen[id(group)] if group else default
        if choice.kind == "muon":
            named = group is not None and group.kind == "muon" and parameter.ndim > 1  # set by the user
            choice = _half_of_muon(choice, parameter in hidden or named)
        if choice.kind == "adamw" and run.moments == "bf16":
            choice = replace(choice, kind=BF16)
        rate = ((group and group.lr) or treatments.of(name).lr or train.lr) / train.lr
        decay = 0.0 if parameter in spared else run.weight_decay
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        # Fused kernels accept either only sharded or only unsharded parameters.
        members[choice][decay, rate, is_sharded(parameter)].append(parameter)
    return members


@contextmanager
def optimizer_state_offloaded(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager: offload optimizer state and averaged weights to the CPU, if `parallel.offload` sets it."""
    if not isinstance(optimizer, OptimizerGroup) or optimizer.offloaded_state is None:
        yield
        return
    offloaded_state = optimizer.offloaded_state
    values = [value for state in optimizer.state.values() for value in state.values()]
    values += optimizer.average.values()
    with torch.no_grad():  # with gradients, `local_shard` would return a new view every time
        tensors = [local_shard(value) for value in values if isinstance(value, torch.Tensor)]
    offloaded_state.offload([tensor for tensor in tensors if type(tensor) is torch.Tensor or is_fake(tensor)])
    try:
        yield
    finally:
        offloaded_state.restore()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups to `lr` times their `rate` (default: 1)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate", 1.0)


def try_fused_step(optimizer: torch.optim.Optimizer, skip: torch.Tensor, excess: torch.Tensor | None) -> bool:
    """Update the weights without a host sync, if the optimizer has a fused kernel for it.

    Args:
        optimizer: The optimizer.
        skip: Boolean tensor on the device. If true, weights and optimizer state stay as they are.
        excess: Divisor of the gradients on the device, for clipping. The fused kernel divides by it, which saves a
            separate pass over the gradients. None for no clipping.

    Returns:
        False if the optimizer does not support this. Nothing is done then.
    """
    parts = optimizer.parts if isinstance(optimizer, OptimizerGroup) else [optimizer]
    if not all(type(part) is ShardAdamW and part.defaults["fused"] for part in parts):
        return False
    if any(p.device != skip.device for part in parts for group in part.param_groups for p in group["params"]):
        # Offloaded weights: copy explicitly, because torch does not wait for its own copies to the CPU.
        skip, excess = skip.cpu(), None if excess is None else excess.cpu()
    for part in parts:
        # torch's fused kernels read these attributes, which no class declares.
        vars(part).update(found_inf=skip.float(), grad_scale=None if excess is None else excess.float())
        part.step()
    return True


@torch.no_grad()
def update_average(optimizer: torch.optim.Optimizer, ema: EmaSettings | None, step: int) -> None:
    """Update the moving average with the weights after step `step`, every `ema.every` steps. None disables it."""
    if ema is not None and step % ema.every == 0:
        assert isinstance(optimizer, OptimizerGroup)
        for parameter, average in optimizer.average.items():
            average.lerp_(parameter.to(average.dtype), 1 - ema.decay)


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that Muon applies to: weights of linear layers and experts.

    Embeddings, routers and heads are excluded. Heads are the output embeddings of transformers models, and linear
    layers with `head` in their name.
    """
    kept: set[nn.Parameter] = set(_parameters_of("embedding", model))
    kept |= {p for router, _ in routers(model).values() for p in router.parameters()}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and isinstance(head := part.get_output_embeddings(), nn.Module):
            kept |= set(head.parameters())
    found: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        last = [part.rpartition("_")[2] for part in name.split(".")]
        if isinstance(module, nn.Linear) and "head" not in last:
            found |= {p for p in module.parameters(recurse=False) if p.ndim == 2}
        elif is_experts(module):
            found |= {p for p in module.parameters(recurse=False) if p.ndim == 3}
    return found - kept


def _choices(config: Config) -> list[Choice]:
    """Return the choice of the run, followed by that of each group in `optimizer.groups`."""
    run = config.optimizer
    choices = [Choice(run.kind, _text(run.options), "optimizer")]
    for i, group in enumerate(run.groups):
        own = group.kind is not None and group.kind != run.kind
        options = group.options if own else run.options | group.options
        key = f"optimizer.groups.{i}" if own or group.options else "optimizer"
        choices.append(Choice(group.kind or run.kind, _text(options), key))
    return choices


def _text(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _class_of(choice: Choice) -> Any:
    """Return the optimizer class. Checks the options of plugins; the config has checked those of built-in kinds."""
    key, kind = choice.key, KINDS.get(choice.kind)
    if kind and kind.package and find_spec(kind.package) is None:
        raise UserError(f"{key}.kind: {choice.kind} needs the package {kind.package}: pip install {kind.package}")
    spec = kind.target if kind else choice.kind
    found = resolve_class(spec, f"{key}.kind", torch.optim.Optimizer, EXPECTED)
    if kind is None:
        decay = {"weight_decay": 0.0} if _takes_decay(found) else {}
        check_call(found, choice.kind, f"{key}.options", [[]], {"lr": 1.0, **choice.arguments, **decay})
    return found


def _takes_decay(optimizer_class: Any) -> bool:
    known = keyword_parameters(optimizer_class)
    return known is None or "weight_decay" in known


def _half_of_muon(choice: Choice, is_matrix: bool) -> Choice:
    """Return the choice for a parameter under `muon`: Muon for matrices, AdamW for all others, with their options."""
    options = json.loads(choice.options)
    kept = {name: value for name, value in options.items() if (name in BETAS) != is_matrix}
    return replace(choice, kind="muon" if is_matrix else "adamw", options=_text(kept))


def _build(
    choice: Choice,
    groups: Mapping[tuple[float, float, bool], list[nn.Parameter]],
    config: Config,
    names: Mapping[nn.Parameter, str],
) -> torch.optim.Optimizer:
    found = _class_of(choice)
    ordered = sorted(groups.items(), key=lambda group: (-group[0][0], group[0][1], not group[0][2]))
    settings: list[dict[str, Any]] = [
        {"params": members, "weight_decay": decay, "rate": rate} for (decay, rate, _), members in ordered
    ]
    if not _takes_decay(found) and any(decay for decay, *_ in groups):
        raise UserError(f"{choice.key}.kind: {choice.kind} takes no weight_decay; set optimizer.weight_decay: 0")
    arguments = choice.arguments | {"lr": config.train.lr}
    if _takes_decay(found):
        arguments["weight_decay"] = config.optimizer.weight_decay  # only a default: each parameter group sets its own
    if choice.kind == "muon" and config.train.precision == "bf16":
        arguments["dtype"] = torch.bfloat16
    if choice.kind == BF16:
        arguments |= {"names": names, "seed": config.train.seed}
    try:
        if choice.kind not in KINDS:
            check_state(found, arguments, settings, choice)
        built: torch.optim.Optimizer = found(settings, **arguments)
    except UserError:
        raise
    except CODE_ERRORS as error:
        given = choice.options if len(choice.options) <= 80 else choice.options[:77] + "..."
        raise UserError(f"{choice.key}.options: {choice.kind} does not take {given}: {named_line(error)}") from error
    return built


def check_state(found: Any, arguments: Mapping[str, Any], settings: Sequence[dict[str, Any]], choice: Choice) -> None:
    """Check that checkpoints can store and reshard the state of an optimizer plugin.

    Runs one step on copies of the smallest parameter of each kind: scalars, vectors, and all others.

    Raises:
        UserError: If a step changes the parameter groups, or the state is not made of suitable tensors.
    """
    smallest: dict[int, nn.Parameter] = {}
    for p in sorted((p for group in settings for p in group["params"]), key=lambda p: -p.numel()):
        smallest[min(p.ndim, 2)] = p
    copies = [nn.Parameter(p.detach().clone()) for p in smallest.values()]
    trial = found([settings[0] | {"params": copies}], **arguments)
    before = trial.param_groups[0] | {"params": None}
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    trial.step()
    key, kind = f"{choice.key}.kind", choice.kind
    after = trial.param_groups[0] | {"params": None}
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed:
        raise UserError(
            f"{key}: {kind} changes {changed[0]!r} of its parameter groups in a step, which no checkpoint keeps; "
            "expected all that changes in self.state[parameter]"
        )
    for copy in copies:
        for name, value in trial.state[copy].items():
            whole = isinstance(value, torch.Tensor) and (value.ndim == 0 or type(value) is type(copy.data))
            if not whole:
                raise UserError(
                    f"{key}: the state {name!r} of {kind} is a {type(value).__name__}, which cannot be saved and "
                    "resharded; expected tensors made from the parameter (torch.zeros_like(p)), or of no dimension"
                )


def _average_of(parts: Sequence[torch.optim.Optimizer]) -> dict[nn.Parameter, torch.Tensor]:
    """Return a copy of every trained parameter, sharded like the parameter, in at least fp32."""
    parameters = [p for part in parts for group in part.param_groups for p in group["params"]]
    return {p: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in parameters}


def _parameters_of(kind: str, model: nn.Module) -> list[nn.Parameter]:
    if kind == "embedding":
        return [
            p
            for module in model.modules()
            if isinstance(module, nn.Embedding)
            for p in module.parameters(recurse=False)
        ]
    if kind == "bias":
        return [p for name, p in model.named_parameters() if name.endswith("bias")]
    # Most models define their own norm classes. They share only the name and a one-dimensional weight.
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    return [p for module in norms for p in module.parameters(recurse=False) if p.ndim <= 1]
