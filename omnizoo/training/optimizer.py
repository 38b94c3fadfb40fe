"""From `optimizer` in the config to an optimizer over sharded parameters: which class updates which of them, how fast,
with how much decay."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnizoo.assembly.parts import Treatments
from omnizoo.config.doors import CODE_ERRORS, check_call, resolve_class, takes
from omnizoo.config.errors import UserError, named_line
from omnizoo.config.options import tuple_of
from omnizoo.config.schema import Config
from omnizoo.config.train_section import Ema
from omnizoo.models.hf_private import is_experts, routers
from omnizoo.ops.offload import StateAway
from omnizoo.ops.torch_private import is_fake
from omnizoo.parallel.shard import is_sharded, local_of
from omnizoo.training.adamw import AdamW

BETAS = {"betas": (0.9, 0.95), "eps": 1e-8}
BF16 = "adamw_bf16"  # what `adamw` is with `optimizer.moments: bf16`
TALKING = ("muon", "adafactor")  # need more than a rank's own shard
EXPECTED = "a torch.optim.Optimizer: Class(params, lr, weight_decay, **options)"


@dataclass(frozen=True)
class Kind:
    target: str
    defaults: Mapping[str, Any]
    package: str | None = None  # that must be installed for it


KINDS = {
    "adamw": Kind("omnizoo.training.adamw:AdamW", BETAS | {"fused": True}),
    "muon": Kind("omnizoo.training.muon:Muon", {}),
    "adafactor": Kind("omnizoo.training.adafactor:Adafactor", {}),
    "adamw_8bit": Kind("omnizoo.training.adamw_8bit:AdamW8bit", BETAS, package="torchao"),
}


WITH_BF16_MOMENTS = Kind("omnizoo.training.adamw_bf16:AdamW", BETAS)


def built_in(kind: str) -> Kind | None:
    return WITH_BF16_MOMENTS if kind == BF16 else KINDS.get(kind)


@dataclass(frozen=True)
class Choice:
    """An optimizer's class and arguments; `key` is where the config says so."""

    kind: str
    options: str  # JSON, so that equal ones are one
    key: str

    @property
    def arguments(self) -> dict[str, Any]:
        kind = built_in(self.kind)
        return dict(kind.defaults if kind else {}) | {
            name: tuple_of(value) for name, value in json.loads(self.options).items()
        }

    def only(self, names: Iterable[str], kind: str) -> "Choice":
        options = {name: value for name, value in json.loads(self.options).items() if name in names}
        return Choice(kind, _text(options), self.key)


class Combined(torch.optim.Optimizer):
    """Several optimizers as one, and a moving average of the weights next to them.

    Parameter groups and state are the very objects of its parts, so a schedule and a checkpoint see no difference.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer], average: dict[nn.Parameter, torch.Tensor]) -> None:
        self.parts, self.average = parts, average
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.state.update(part.state)
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def check_optimizer(config: Config) -> None:
    """Refuse kinds and options that cannot be, before anything is loaded."""
    for choice in _choices(config):
        _class_of(choice)
        if "parameters" in config.parallel.offload and choice.kind in TALKING:
            raise UserError(
                f"parallel.offload: `parameters` are updated on the host, and {choice.kind} ({choice.key}.kind) has "
                "ranks talk to each other in an update, which takes their devices; offload `optimizer` instead, or "
                "use adamw or adamw_8bit"
            )


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Each group has its `rate`, relative to `train.lr`: parts of a model may learn faster or slower than the run."""
    check_optimizer(config)
    run, train = config.optimizer, config.train
    treatments = Treatments(model, config.model, run.groups)
    default, *others = _choices(config)
    chosen = {id(group): choice for group, choice in zip(run.groups, others, strict=True)}
    spared = {parameter for kind in run.no_decay for parameter in _parameters_of(kind, model)}
    hidden = hidden_matrices(model) if any(choice.kind == "muon" for choice in (default, *others)) else set()
    members: dict[Choice, dict[tuple[float, float, bool], list[nn.Parameter]]] = defaultdict(lambda: defaultdict(list))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group = treatments.groups.of(name)
        choice = chosen[id(group)] if group else default
        if choice.kind == "muon":
            named = group is not None and group.kind == "muon" and parameter.ndim > 1  # the user has said so
            choice = _half_of_muon(choice, parameter in hidden or named)
        if choice.kind == "adamw" and run.moments == "bf16":
            choice = replace(choice, kind=BF16)
        rate = ((group and group.lr) or treatments.of(name).lr or train.lr) / train.lr
        decay = 0.0 if parameter in spared else run.weight_decay
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        # Fused kernels take parameters that are all sharded, or all whole.
        members[choice][decay, rate, is_sharded(parameter)].append(parameter)
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts = [_build(choice, groups, config, names) for choice, groups in members.items()]
    if len(parts) == 1 and run.ema is None:
        return parts[0]
    return Combined(parts, _average_of(parts) if run.ema else {})


@contextmanager
def state_on_host(optimizer: torch.optim.Optimizer, away: StateAway | None) -> Iterator[None]:
    """Inside, the state of `optimizer` (and its average of weights) is `away` from the device, if there is a place."""
    if away is not None:
        held = [value for state in optimizer.state.values() for value in state.values()]
        if isinstance(optimizer, Combined):
            held += optimizer.average.values()
        with torch.no_grad():  # or they would be views, new ones every time
            tensors = [local_of(value) for value in held if isinstance(value, torch.Tensor)]
        away.leave([tensor for tensor in tensors if type(tensor) is torch.Tensor or is_fake(tensor)])
    try:
        yield
    finally:
        if away is not None:
            away.come_back()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["rate"]


def step_unless(optimizer: torch.optim.Optimizer, skip: torch.Tensor, excess: torch.Tensor | None) -> bool:
    """Update the weights, unless `skip`, a bool on the device, is true: then neither they nor the optimizer change. The
    host does not learn which, and does not wait. Gradients are divided by `excess` on the way: no pass over all of them
    just for that. False, and nothing is done: this optimizer cannot do so."""
    parts = optimizer.parts if isinstance(optimizer, Combined) else [optimizer]
    if not all(type(part) is AdamW and part.defaults["fused"] for part in parts):
        return False
    if any(p.device != skip.device for part in parts for group in part.param_groups for p in group["params"]):
        # Weights that are on the host. torch would not wait for what it brings there.
        skip, excess = skip.cpu(), None if excess is None else excess.cpu()
    for part in parts:
        # Where torch's fused kernels look, though no class says so.
        vars(part).update(found_inf=skip.float(), grad_scale=None if excess is None else excess.float())
        part.step()
    return True


@torch.no_grad()
def update_average(optimizer: torch.optim.Optimizer, ema: Ema | None, step: int) -> None:
    """Add the weights after step `step` to their moving average, if the config wants one."""
    if ema is not None and step % ema.every == 0:
        assert isinstance(optimizer, Combined)
        for parameter, average in optimizer.average.items():
            average.lerp_(parameter.to(average.dtype), 1 - ema.decay)


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """What Muon is for: weights of linear layers and of experts, but not of embeddings, heads and routers.

    Heads are those that a model says are its output, and linear layers with `head` for a name.
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
    """The run's, then each group's."""
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
    """The class; of one's own, with its options looked at (the config knows those of the others)."""
    key, kind = choice.key, built_in(choice.kind)
    if kind and kind.package and find_spec(kind.package) is None:
        raise UserError(f"{key}.kind: {choice.kind} needs the package {kind.package}: pip install {kind.package}")
    spec = kind.target if kind else choice.kind
    found = resolve_class(spec, f"{key}.kind", torch.optim.Optimizer, EXPECTED)
    if kind:
        return found
    known = takes(found)
    given: dict[str, Any] = {"lr": 1.0} | choice.arguments
    if known is None or "weight_decay" in known:
        given["weight_decay"] = 0.0
    check_call(found, choice.kind, f"{key}.options", [[]], given)
    return found


def _half_of_muon(choice: Choice, matrix: bool) -> Choice:
    """The options of Muon for a matrix, of AdamW for the rest."""
    if matrix:
        return choice.only(set(json.loads(choice.options)) - set(BETAS), "muon")
    return choice.only(BETAS, "adamw")


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
    known = takes(found)
    if known is not None and "weight_decay" not in known and any(decay for decay, *_ in groups):
        raise UserError(f"{choice.key}.kind: {choice.kind} takes no weight_decay; set optimizer.weight_decay: 0")
    arguments = choice.arguments | {"lr": config.train.lr}
    if known is None or "weight_decay" in known:
        arguments["weight_decay"] = config.optimizer.weight_decay  # a default: each group has its own
    if choice.kind == "muon" and config.parallel.precision == "bf16":
        arguments["dtype"] = torch.bfloat16
    if choice.kind == BF16:
        arguments |= {"names": names, "seed": config.train.seed}
    try:
        if built_in(choice.kind) is None:
            check_state(found, arguments, settings, choice)
        built: torch.optim.Optimizer = found(settings, **arguments)
    except UserError:
        raise
    except CODE_ERRORS as error:
        given = choice.options if len(choice.options) <= 80 else choice.options[:77] + "..."
        raise UserError(f"{choice.key}.options: {choice.kind} does not take {given}: {named_line(error)}") from error
    return built


def check_state(found: Any, arguments: Mapping[str, Any], settings: Sequence[dict[str, Any]], choice: Choice) -> None:
    """Refuse an optimizer whose state no checkpoint can hold or reshard: try it on copies of two parameters."""
    smallest: dict[int, nn.Parameter] = {}
    for p in sorted((p for group in settings for p in group["params"]), key=lambda p: -p.numel()):
        smallest[min(p.ndim, 2)] = p
    copies = [nn.Parameter(p.detach().clone()) for p in smallest.values()]
    trial = found([settings[0] | {"params": copies}], **arguments)
    before = {name: value for name, value in trial.param_groups[0].items() if name != "params"}
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    trial.step()
    key, kind = f"{choice.key}.kind", choice.kind
    after = {name: value for name, value in trial.param_groups[0].items() if name != "params"}
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
    """A copy of every trained weight, sharded as it is, in fp32 at least."""
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
    # Norms are custom classes in most models; what they share is the name, and a weight of one dimension.
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    return [p for module in norms for p in module.parameters(recurse=False) if p.ndim <= 1]
