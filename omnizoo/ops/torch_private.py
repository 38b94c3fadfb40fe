"""Private names of torch, used from here only: attention kernels that hand out the log-sum-exp and take it back, maps
over nested arguments, calls past function modes, and what a dry run needs: fake tensors, a device made of Python,
collectives that send nothing.

Checked on torch 2.13.0. A test compares the schemas below with torch's own, so that another version fails loudly.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]  # not in torch's stubs
from torch._C._profiler import _RecordFunctionFast
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import RestartAnalysis as RestartAnalysis
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

T = TypeVar("T")

# What torch asks its dispatch modes for the device of a fake tensor with: more often than for all else together.
DEVICE_OF = torch.ops.prim.device.default

SCHEMAS = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
    "_flash_attention_forward": (
        "(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, "
        "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None, Tensor? block_table=None, "
        "int? num_splits=None) -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
        "Tensor debug_attn_mask)"
    ),
    "_flash_attention_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor rng_state, "
        "Tensor unused, *, float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None) "
        "-> (Tensor, Tensor, Tensor)"
    ),
}


def without_function_modes() -> AbstractContextManager[None]:
    """Inside it, torch's functions do what they say, whatever `TorchFunctionMode` is on."""
    return torch._C.DisableTorchFunction()


def change_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As `module.to` does for all tensors alike: parameters, gradients and buffers become what `change` makes of them,
    and modules with a way of their own to be moved are told."""
    module._apply(change)


def free_gathered_buffer(unit: Any) -> None:
    """Let a unit of FSDP2 free what it has received as soon as its weights are in place. It would keep that until the
    next unit has received its own, for streams that work at the same time, which a CPU does not have."""
    unit._set_unshard_async_op(True)


def use_in_place(unit: Any) -> None:
    """Let a unit of FSDP2 that one rank has for itself compute with its shards, which are the whole weights, and take
    gradients as they are: torch 2.13 copies all of both. What has to be cast, or brought to the device, is as ever."""
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.init_all_gather_outputs = partial(_take_shard, parameter, parameter.init_all_gather_outputs)
            parameter.free_unsharded_param = partial(_free_copy, parameter, parameter.free_unsharded_param)
        group.post_backward = partial(_take_gradients, group, group.post_backward)


def _take_shard(
    parameter: Any, own: Callable[..., None], sizes: list[int], dtypes: list[torch.dtype], ranks: int, device: Any
) -> None:
    data = parameter._sharded_param_data
    is_whole = data.untyped_storage().nbytes() == data.nbytes and list(sizes) == [data.numel()]
    if not is_whole or dtypes != [data.dtype] or data.device != device or hasattr(data, "fsdp_pre_all_gather"):
        own(sizes, dtypes, ranks, device)
    elif not _is_shard(parameter):
        parameter.all_gather_outputs = [data]
        vars(parameter).pop("_unsharded_param", None)  # of a copy, or of what the weights were before they were moved


def _is_shard(parameter: Any) -> bool:
    outputs = parameter.all_gather_outputs
    return len(outputs) == 1 and outputs[0] is parameter._sharded_param_data


def _free_copy(parameter: Any, own: Callable[[], None]) -> None:
    if not _is_shard(parameter):
        own()


def _take_gradients(group: Any, own: Callable[..., None], *unused: Any) -> None:
    for parameter in group.fsdp_params if group.reduce_grads else ():
        whole, shard = getattr(parameter, "_unsharded_param", None), parameter.sharded_param
        is_plain = parameter.unsharded_accumulated_grad is None and not shard._post_accumulate_grad_hooks
        if whole is None or whole.grad is None or whole.grad.dtype != shard.dtype or not is_plain:
            continue
        if parameter.offload_to_cpu and whole.grad.device.type != "cpu":
            continue
        grad = parameter.unsharded_grad_data.contiguous()
        whole.grad = None
        if shard.grad is None:
            shard.grad = parameter.to_sharded_dtensor(grad)
        else:
            shard.grad._local_tensor += grad
    own(*unused)  # finds none, and frees what was gathered


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def abort_groups() -> None:
    """End all process groups now, whatever is still under way in them."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def register_fake_collectives() -> None:
    """Let `init_process_group` know the backend `fake`."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - importing it registers it


def register_device(name: str, module: Any, fused: Sequence[str]) -> None:
    """Make `torch.device(name)` a device that holds fake tensors only; it stays until the process ends.

    Operators of aten that are `fused` have a kernel of their own there: torch would take them apart.
    """
    if torch._C._get_privateuse1_backend_name() == name:
        return
    _setup_privateuseone_for_python_backend(name, module)
    for operator in fused:
        _KERNELS.impl(operator, _no_kernel, "PrivateUse1")


def _no_kernel(*_: Any) -> None:
    raise AssertionError("a tensor of a device without memory is not fake")


_KERNELS = torch.library.Library("aten", "IMPL")


@contextmanager
def tensors_made_on_host() -> Iterator[None]:
    """`torch.tensor(list, device=...)` makes a host tensor and moves it, so that a dispatch mode sees both."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextmanager
def quiet_shard_propagation(sharded: Any, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """`sharded`, which is DTensor, runs operators on tensors of global shape to know their metadata: enter `around()`
    while it does."""
    propagator = type(sharded._op_dispatcher.sharding_propagator)
    names = [name for name in dir(propagator) if name.startswith("_propagate_tensor_meta")]
    assert names, "torch has renamed them"
    before = {name: getattr(propagator, name) for name in names}

    def muted(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with around():
                return function(*args, **kwargs)

        return run

    try:
        for name, function in before.items():
            setattr(propagator, name, muted(function))
        yield
    finally:
        for name, function in before.items():
            setattr(propagator, name, function)


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of an operator that it changes in place, by its schema."""
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    written = [named.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[1, heads, tokens, width]` of any strides, fewer kv heads allowed; no empty tensors (the process would die).

    `causal` aligns the first query with the first key; `mask` is added, in the dtype of `q`. Returns out and
    `lse [1, heads, queries]`.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def flash_cpu_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


@dataclass(frozen=True)
class Varlen:
    """Pieces of queries and keys by `cu_seqlens`; the window is aligned at the last query and key, -1 is no limit."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    left: int
    right: int


def flash_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Varlen, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[tokens, heads, width]`, fewer kv heads allowed.

    As `torch.nn.attention.varlen.varlen_attn` calls it; returns out and `lse [heads, queries]`.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, pieces.cu_q, pieces.cu_k, pieces.max_q, pieces.max_k, 0.0),
        (pieces.left, pieces.right) == (-1, 0),
        False,
        scale=scale,
        window_size_left=pieces.left,
        window_size_right=pieces.right,
    )
    return out, lse


def flash_cuda_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    pieces: Varlen,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(grad_out, q, k, v, out, lse, pieces.cu_q, pieces.cu_k, pieces.max_q, pieces.max_k, 0.0),
        (pieces.left, pieces.right) == (-1, 0),
        *(rng_state, torch.empty(0, device=q.device)),
        scale=scale,
        window_size_left=pieces.left,
        window_size_right=pieces.right,
    )
    return dq, dk, dv


class Recomputation:
    """What the blocks of a model that are computed again in backward share with what is inside of them."""

    def __init__(self) -> None:
        self.is_aside = False  # while true, operators are not among those that are kept or made again
        self._kept: deque[Any] | None = None  # of the block that is being computed
        self._is_again = False
        self._is_selective = False
        self.is_for_gradients = False  # while true, what a computation gives is not looked at, only its graph

    @contextmanager
    def for_gradients(self) -> Iterator[None]:
        before, self.is_for_gradients = self.is_for_gradients, True
        try:
            yield
        finally:
            self.is_for_gradients = before

    def once(self, make: Callable[[], T], large: bool = False) -> T:
        """What `make` gives; when a block is computed again, what it gave the first time.

        What is `large` is kept by selective recomputation only.
        """
        if self._kept is None or (large and not self._is_selective):
            return make()
        if self._is_again:
            kept: T = self._kept.popleft()
            return kept
        with self.aside():
            made = make()
        self._kept.append(made)
        return made

    @contextmanager
    def aside(self) -> Iterator[None]:
        before, self.is_aside = self.is_aside, True
        try:
            yield
        finally:
            self.is_aside = before

    def contexts(self, policy: Callable[..., CheckpointPolicy] | None) -> tuple[Any, Any]:
        """What `checkpoint` takes as `context_fn`. With a policy, torch's own modes, which keep what it says; and
        all-to-alls, which they cannot: those write into a tensor they are given."""
        kept: deque[Any] = deque()
        first, again = (self._within(kept, is_again, policy is not None) for is_again in (False, True))
        if policy is None:
            return first, again
        keeping, kept_modes = create_selective_checkpoint_contexts(policy)
        keeping.__class__, kept_modes.__class__ = _Keeping, _Kept
        keeping.recomputation = kept_modes.recomputation = self
        keeping.received = kept_modes.received = deque()
        return both(first, keeping), both(again, kept_modes)

    @contextmanager
    def _within(self, kept: deque[Any], is_again: bool, is_selective: bool) -> Iterator[None]:
        before = self._kept, self._is_again, self._is_selective
        self._kept, self._is_again, self._is_selective = kept, is_again, is_selective
        try:
            yield
        finally:
            self._kept, self._is_again, self._is_selective = before


@contextmanager
def both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _SteppingAside(TorchDispatchMode):
    recomputation: Recomputation
    received: deque[torch.Tensor]  # by each all-to-all

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recomputation.is_aside:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.alltoall_base_.default:
            return self.exchange(func, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def exchange(self, func: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class _Keeping(_SteppingAside, _CachingTorchDispatchMode):
    def exchange(self, func: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = func(output, *args, **kwargs)
        self.received.append(output.detach())  # without its handle, which holds on to what was sent
        return work


class _Kept(_SteppingAside, _CachedTorchDispatchMode):
    def exchange(self, func: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output.copy_(self.received.popleft())
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result([])
        return _create_work_from_future(done).boxed()  # that nobody has to wait for


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range of the profiler. `torch.profiler.record_function` is an operator, which modes of selective recomputation
    would see, and takes 20 times as long."""
    made: AbstractContextManager[Any] = _RecordFunctionFast(name)
    return made


def runs_as_graph(module: torch.nn.Module) -> bool:
    """Whether its user has had `module` compiled by torch.compile."""
    return (
        "_orig_mod" in module._modules  # what `torch.compile(module)` returns
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


class Compilations:
    """Around calls of compiled code, one at a time: what hindered the compilations that a call made."""

    def __init__(self) -> None:
        # What cannot be compiled runs as it is, and floats (epsilons, scales) are numbers in a graph.
        self._settings = torch._dynamo.config.patch(suppress_errors=True, specialize_float=True)
        self._frames = self._failed = 0
        self._reasons: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._frames, self._failed, self._reasons = *_frames(), _reasons()
        self._settings.__enter__()

    def __exit__(self, *_: object) -> None:
        self._settings.__exit__(None, None, None)

    def trouble(self) -> list[str]:
        """Why graphs of the last call had to end, or could not be made."""
        frames, failed = _frames()
        if frames == self._frames:
            return []
        reasons = list(_reasons() - self._reasons)
        if failed > self._failed and not reasons:
            metrics = [each for each in get_compilation_metrics() if each.fail_type]
            reasons += [f"{each.fail_type}: {each.fail_reason}" for each in metrics[-1:]] or ["torch does not say why"]
        return reasons


def _frames() -> tuple[int, int]:
    """Functions that torch.compile has tried to compile, and those of them that it could not."""
    frames = counters["frames"]
    return frames["total"], frames["total"] - frames["ok"]


def _reasons() -> Counter[str]:
    return Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def build_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], backend: str) -> Callable[..., Any]:
    """Code for a graph that torch.compile has found, and for its backward pass: an error there comes now, and not when
    it is too late. Random numbers are those that would be drawn without compilation."""
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        if backend == "inductor":
            from torch._inductor.compile_fx import compile_fx

            made: Any = compile_fx(graph, inputs, config_patches={"fallback_random": True})
        else:
            made = lookup_backend(backend)(graph, list(inputs))
    run: Callable[..., Any] = made
    return run


def missing_compiler() -> str | None:
    """Why graphs cannot be compiled for a CPU here; None if they can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error).splitlines()[0]
    return None
