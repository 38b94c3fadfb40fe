"""Build the optimizer of a model from the section `optimizer` of the config.

Each parameter is assigned an optimizer class, a learning rate and a weight decay.
"""

import json
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
from omnizoo.config.versions import install_command
from omnizoo.models.component_settings import ComponentSettings
from omnizoo.models.hf_private import is_experts, routers
from omnizoo.ops.memory.offload import OffloadedState
from omnizoo.ops.torch_private import is_fake
from omnizoo.parallel.fsdp.sharded_tensors import is_sharded, local_shard
from omnizoo.parallel.rendezvous import ranks_on_node
from omnizoo.training.optimizers.adamw import ShardAdamW

BETAS = {"betas": (0.9, 0.95), "eps": 1e-8}
# Names of linear layers whose rows are the heads of queries, keys or values.
QUERY_KEY_VALUE = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "qkv", "query", "key", "value"),
    *("query_key_value", "c_attn", "Wqkv", "wq", "wk", "wv"),
)
BF16 = "adamw_bf16"  # `adamw` with `optimizer.moments: bf16`; the config cannot set this kind directly
COLLECTIVE_KINDS = ("muon", "adafactor")  # optimizers whose update needs collectives
EXPECTED = "a torch.optim.Optimizer: Class(params, lr, weight_decay, **options)"
# Keyed by (weight decay, relative rate, is sharded).
ParameterGroups = dict[tuple[float, float, bool], list[nn.Parameter]]


@dataclass(frozen=True)
class OptimizerKind:
    """A built-in kind of optimizer."""

    target: str  # import path of the class
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
        """Keyword arguments of the class: the defaults of the kind and the options of the config."""
        defaults = KINDS[self.kind].defaults if self.kind in KINDS else {}
        options = {name: to_tuple(value) for name, value in json.loads(self.options).items()}
        return {**defaults, **options}


class OptimizerGroup(torch.optim.Optimizer):
    """Several optimizers combined into one, with a moving average of the weights and optional CPU offload of the state.

    Parameter groups and state are shared with the optimizers in `parts`, so schedules and checkpoints treat the group
    like a single optimizer.
    """

    def __init__(
        self,
        parts: Sequence[torch.optim.Optimizer],
        average: dict[nn.Parameter, torch.Tensor],
        offloaded_state: OffloadedState | None = None,
    ) -> None:
        """Join the optimizers.

        Args:
            parts: The optimizers. No two of them have a parameter in common.
            average: The moving average of each parameter; empty without `optimizer.ema`.
            offloaded_state: Offloads the state to the CPU; None to keep it on the device.
        """
        self.parts = parts
        self.average = average
        self.offloaded_state = offloaded_state
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.state.update(part.state)
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run a step of each optimizer."""
        for part in self.parts:
            part.step()


def check_optimizer(config: Config) -> None:
    """Check the kinds and options of the optimizer before weights are loaded.

    Raises:
        UserError: If a kind or an option is invalid, or cannot be combined with `parallel.offload`.
    """
    for choice in _choices(config):
        _class_of(choice)
        if "parameters" in config.parallel.offload and choice.kind in COLLECTIVE_KINDS:
            raise UserError(
                f"parallel.offload: parameters cannot be combined with {choice.key}.kind: {choice.kind}, whose update "
                "needs collectives on the device. Use adamw or adamw_8bit, or offload only optimizer."
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
    parameters = _assign_parameters(model, config)
    parts = [_build(choice, groups, config, names, model) for choice, groups in parameters.items()]
    offload = config.parallel.offload
    # With offloaded parameters, the optimizer state is always on the CPU.
    is_offloaded = "optimizer" in offload and "parameters" not in offload
    if len(parts) == 1 and config.optimizer.ema is None and not is_offloaded:
        return parts[0]
    state = None
    if is_offloaded:
        device = next(parameter.device for parameter in model.parameters() if parameter.requires_grad)
        state = OffloadedState(device, ranks=ranks_on_node())
    average = _initial_average(parts) if config.optimizer.ema else {}
    return OptimizerGroup(parts, average, state)


def _assign_parameters(model: nn.Module, config: Config) -> dict[Choice, ParameterGroups]:
    """Return the trained parameters, grouped by optimizer, then by (weight decay, relative rate, is sharded)."""
    settings, train = config.optimizer, config.train
    components = ComponentSettings(model, config.model, settings.groups)
    choices = _choices(config)
    default, *group_choices = choices
    choice_of_group = {id(group): choice for group, choice in zip(settings.groups, group_choices, strict=True)}
    without_decay = {parameter for kind in settings.no_decay for parameter in _parameters_of(kind, model)}
    hidden: set[nn.Parameter] = set()
    if any(choice.kind == "muon" for choice in choices):
        hidden = hidden_matrices(model)

    assigned: dict[Choice, ParameterGroups] = defaultdict(lambda: defaultdict(list))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group = components.groups.get(name)
        choice = choice_of_group[id(group)] if group else default
        if choice.kind == "muon":
            is_set_by_user = group is not None and group.kind == "muon" and parameter.ndim > 1
            choice = _half_of_muon(choice, parameter in hidden or is_set_by_user)
        if choice.kind == "adamw" and settings.moments == "bf16":
            choice = replace(choice, kind=BF16)

        lr = (group and group.lr) or components.of(name).lr or train.lr
        decay = 0.0 if parameter in without_decay else settings.weight_decay
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        # Fused kernels accept either only sharded or only unsharded parameters.
        assigned[choice][decay, lr / train.lr, is_sharded(parameter)].append(parameter)
    return assigned


@contextmanager
def optimizer_state_offloaded(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager that offloads optimizer state and averaged weights to the CPU, if the config enables it."""
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


def try_fused_step(optimizer: torch.optim.Optimizer, skip: torch.Tensor, grad_divisor: torch.Tensor | None) -> bool:
    """Update the weights without a host sync, if the optimizer has a fused kernel for it.

    Args:
        optimizer: The optimizer.
        skip: Boolean tensor on the device. If true, weights and optimizer state do not change.
        grad_divisor: Divisor of the gradients on the device, for clipping. The fused kernel divides by it, to save a
            separate pass over the gradients. None for no clipping.

    Returns:
        False if the optimizer does not support this. In this case, nothing is updated.
    """
    parts = optimizer.parts if isinstance(optimizer, OptimizerGroup) else [optimizer]
    if not all(type(part) is ShardAdamW and part.defaults["fused"] for part in parts):
        return False
    if any(p.device != skip.device for part in parts for group in part.param_groups for p in group["params"]):
        # The weights are offloaded. Copy explicitly, because torch does not wait for its own copies to the CPU.
        skip = skip.cpu()
        grad_divisor = None if grad_divisor is None else grad_divisor.cpu()
    for part in parts:
        grad_scale = None if grad_divisor is None else grad_divisor.float()
        # torch's fused kernels read these attributes, although no class declares them.
        vars(part).update(found_inf=skip.float(), grad_scale=grad_scale)
        part.step()
    return True


@torch.no_grad()
def update_average(optimizer: torch.optim.Optimizer, ema: EmaSettings | None, step: int) -> None:
    """Update the moving average with the weights after step `step`, every `ema.every` steps.

    If `ema` is None, nothing is averaged.
    """
    if ema is not None and step % ema.every == 0:
        assert isinstance(optimizer, OptimizerGroup)
        for parameter, average in optimizer.average.items():
            average.lerp_(parameter.to(average.dtype), 1 - ema.decay)


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that Muon applies to: weights of linear layers and experts.

    Embeddings, routers and heads are excluded. Heads are the output embeddings of transformers models, and linear
    layers with `head` in their name.
    """
    excluded: set[nn.Parameter] = set(_parameters_of("embedding", model))
    excluded |= {p for router, _ in routers(model).values() for p in router.parameters()}
    for module in model.modules():
        head = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
        if isinstance(head, nn.Module):
            excluded |= set(head.parameters())

    matrices: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        last_words = [part.rpartition("_")[2] for part in name.split(".")]
        if isinstance(module, nn.Linear) and "head" not in last_words:
            matrices |= {p for p in module.parameters(recurse=False) if p.ndim == 2}
        elif is_experts(module):
            matrices |= {p for p in module.parameters(recurse=False) if p.ndim == 3}
    return matrices - excluded


def num_heads(model: nn.Module, key: str) -> dict[torch.Tensor, int]:
    """Return the number of heads in the rows of each query, key and value projection.

    They are the linear layers in `QUERY_KEY_VALUE` of modules with a `head_dim`.

    Raises:
        UserError: If the model has none. The message starts with `key`.
    """
    heads = {}
    for module in model.modules():
        head_dim = getattr(module, "head_dim", None)
        if not isinstance(head_dim, int):
            continue
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and name in QUERY_KEY_VALUE and child.out_features % head_dim == 0:
                heads[child.weight] = child.out_features // head_dim
    if not heads:
        raise UserError(f"{key}: {type(model).__name__} has no query, key or value projections with heads. Remove it.")
    return heads


def _choices(config: Config) -> list[Choice]:
    """Return the optimizer choice of the run, followed by the choice of each group in `optimizer.groups`."""
    settings = config.optimizer
    choices = [Choice(settings.kind, _to_json(settings.options), "optimizer")]
    for i, group in enumerate(settings.groups):
        is_other_kind = group.kind is not None and group.kind != settings.kind
        options = group.options if is_other_kind else settings.options | group.options
        key = f"optimizer.groups.{i}" if is_other_kind or group.options else "optimizer"
        choices.append(Choice(group.kind or settings.kind, _to_json(options), key))
    return choices


def _to_json(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _class_of(choice: Choice) -> Any:
    """Return the optimizer class, and check the options of a plugin. The config has checked built-in kinds."""
    key = choice.key
    kind = KINDS.get(choice.kind)
    if kind and kind.package and find_spec(kind.package) is None:
        raise UserError(
            f"{key}.kind: {choice.kind} needs the package {kind.package}. Run `{install_command(kind.package)}`."
        )
    spec = kind.target if kind else choice.kind
    optimizer_class = resolve_class(spec, f"{key}.kind", torch.optim.Optimizer, EXPECTED)
    if kind is None:
        arguments = {"lr": 1.0, **choice.arguments}
        if _accepts_decay(optimizer_class):
            arguments["weight_decay"] = 0.0
        check_call(optimizer_class, choice.kind, f"{key}.options", [[]], arguments)
    return optimizer_class


def _accepts_decay(optimizer_class: Any) -> bool:
    """Whether the constructor of an optimizer has an argument `weight_decay`."""
    accepted = keyword_parameters(optimizer_class)
    return accepted is None or "weight_decay" in accepted


def _half_of_muon(choice: Choice, is_matrix: bool) -> Choice:
    """Return the choice for a parameter if the optimizer is `muon`: Muon for matrices, AdamW for all others.

    Only the options that apply to the chosen optimizer are kept.
    """
    options = {}
    for name, value in json.loads(choice.options).items():
        is_option_of_adamw = name in BETAS
        if is_option_of_adamw != is_matrix:
            options[name] = value
    return replace(choice, kind="muon" if is_matrix else "adamw", options=_to_json(options))


def _build(
    choice: Choice,
    groups: ParameterGroups,
    config: Config,
    names: Mapping[nn.Parameter, str],
    model: nn.Module,
) -> torch.optim.Optimizer:
    """Build one optimizer.

    Args:
        choice: The class and the options.
        groups: The parameters, keyed by (weight decay, relative rate, is sharded).
        config: The config of the run.
        names: The names of all parameters.
        model: The model.
    """
    optimizer_class = _class_of(choice)
    accepts_decay = _accepts_decay(optimizer_class)
    ordered = sorted(groups.items(), key=lambda group: (-group[0][0], group[0][1], not group[0][2]))
    param_groups: list[dict[str, Any]] = []
    for (decay, rate, _), parameters in ordered:
        param_groups.append({"params": parameters, "weight_decay": decay, "rate": rate})
    if not accepts_decay and any(decay for decay, *_ in groups):
        raise UserError(
            f"{choice.key}.kind: {choice.kind} has no argument weight_decay. Set optimizer.weight_decay: 0."
        )

    arguments = choice.arguments | {"lr": config.train.lr}
    if accepts_decay:
        arguments["weight_decay"] = config.optimizer.weight_decay  # a default; each group sets its decay
    if choice.kind == "muon" and config.train.precision == "bf16":
        arguments["dtype"] = torch.bfloat16
    if choice.kind == "muon" and arguments.get("split_heads"):
        arguments["num_heads"] = num_heads(model, f"{choice.key}.options.split_heads")
    if choice.kind == BF16:
        arguments |= {"names": names, "seed": config.train.seed}
    try:
        if choice.kind not in KINDS:
            check_state(optimizer_class, arguments, param_groups, choice)
        optimizer: torch.optim.Optimizer = optimizer_class(param_groups, **arguments)
    except UserError:
        raise
    except CODE_ERRORS as error:
        options = choice.options if len(choice.options) <= 80 else choice.options[:77] + "..."
        raise UserError(
            f"{choice.key}.options: {choice.kind} failed with {options}: {named_line(error)}. Change the options."
        ) from error
    return optimizer


def check_state(
    optimizer_class: Any, arguments: Mapping[str, Any], param_groups: Sequence[dict[str, Any]], choice: Choice
) -> None:
    """Check that checkpoints can store and reshard the state of an optimizer plugin.

    Runs one step on copies of the smallest parameter of each kind: scalars, vectors, and all others.

    Args:
        optimizer_class: The class of the optimizer.
        arguments: Keyword arguments of the class.
        param_groups: The parameter groups.
        choice: Names the optimizer in messages.

    Raises:
        UserError: If a step changes the parameter groups, or the state is not made of suitable tensors.
    """
    parameters = [p for group in param_groups for p in group["params"]]
    smallest: dict[int, nn.Parameter] = {}  # keyed by the number of dims, at most 2
    for p in sorted(parameters, key=lambda p: -p.numel()):
        smallest[min(p.ndim, 2)] = p
    copies = [nn.Parameter(p.detach().clone()) for p in smallest.values()]
    trial = optimizer_class([param_groups[0] | {"params": copies}], **arguments)
    before = trial.param_groups[0] | {"params": None}
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    trial.step()

    key = f"{choice.key}.kind"
    after = trial.param_groups[0] | {"params": None}
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed:
        raise UserError(
            f"{key}: a step of {choice.kind} changes {changed[0]!r} of its parameter groups, which checkpoints do not "
            "store. Keep everything that changes in self.state[parameter]."
        )
    for copy in copies:
        for name, value in trial.state[copy].items():
            if not isinstance(value, torch.Tensor) or (value.ndim > 0 and type(value) is not type(copy.data)):
                raise UserError(
                    f"{key}: the state {name!r} of {choice.kind} is a {type(value).__name__}, which cannot be saved "
                    "and resharded. Create state with torch.zeros_like(parameter), or as a tensor without dimensions."
                )


def _initial_average(parts: Sequence[torch.optim.Optimizer]) -> dict[nn.Parameter, torch.Tensor]:
    """Return a copy of every trained parameter, sharded like the parameter, in at least fp32."""
    average = {}
    for part in parts:
        for group in part.param_groups:
            for p in group["params"]:
                dtype = torch.promote_types(p.dtype, torch.float32)
                average[p] = p.detach().to(dtype, copy=True)
    return average


def _parameters_of(kind: str, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a kind in `optimizer.no_decay`: `embedding`, `bias` or `norm`."""
    if kind == "embedding":
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        return [p for module in embeddings for p in module.parameters(recurse=False)]
    if kind == "bias":
        return [p for name, p in model.named_parameters() if name.endswith("bias")]
    # Most models define their own norm classes. They share only the name and a one-dimensional weight.
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    return [p for module in norms for p in module.parameters(recurse=False) if p.ndim <= 1]
