"""All uses of private APIs of torch.

Training uses attention kernels that return the log-sum-exp, functions that map over nested arguments,
calls without function modes, and internals of FSDP2, recomputation and torch.compile. Dry runs also use fake tensors, a
device implemented in Python, and collectives that send nothing.

These APIs were checked on torch 2.13.0. A test fails if the schemas of the attention kernels differ in the installed
torch.
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
import torch._inductor.config
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
Replacement = tuple[Any, str, Any]  # (object, name of an attribute, temporary value)

# The operator by which torch gets the device of a fake tensor. Dispatch modes receive it more often than all other
# operators together, so they handle it first.
DEVICE_OF = torch.ops.prim.device.default


@contextmanager
def replaced(*attributes: Replacement) -> Iterator[None]:
    """Context manager: set `owner.name` to `value` for each (owner, name, value), and restore it at the end."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    try:
        for owner, name, value in attributes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def deterministic_compiler() -> Replacement:
    """Return the torch.compile setting that disables the selection of kernels by measured times."""
    return torch._inductor.config, "deterministic", True


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that identifies the storage of a tensor. It is valid while the storage is alive."""
    return int(tensor.untyped_storage()._cdata)


def without_function_modes() -> AbstractContextManager[None]:
    """Return a context manager in which no `TorchFunctionMode` is active."""
    return torch._C.DisableTorchFunction()


def change_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter, gradient and buffer of `module` with `change(tensor)`.

    As `module.to` does, this calls the `_apply` of submodules that override it.
    """
    module._apply(change)


def free_gathered_buffer(unit: Any) -> None:
    """Make an FSDP2 unit free its all-gather buffer as soon as the weights are copied out of the buffer.

    By default, FSDP2 keeps the buffer until the next unit has been gathered, because copies and gathers on different
    streams overlap. This is not needed on CPUs, which have no streams.
    """
    unit._set_unshard_async_op(True)


def use_in_place(unit: Any) -> None:
    """Make an FSDP2 unit with a single rank compute with its shards directly, because they are the full weights.

    By default, torch 2.13 copies the weights in the all-gather and the gradients in the reduce-scatter. Weights that
    must be cast or moved to the device are still copied.
    """
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.init_all_gather_outputs = partial(_take_shard, parameter, parameter.init_all_gather_outputs)
            parameter.free_unsharded_param = partial(_free_copy, parameter, parameter.free_unsharded_param)
        group.post_backward = partial(_take_gradients, group, group.post_backward)


def _take_shard(
    parameter: Any, original: Callable[..., None], sizes: list[int], dtypes: list[torch.dtype], ranks: int, device: Any
) -> None:
    """Use the shard as the output of the all-gather. If it needs a cast or copy, call the `original` method instead."""
    data = parameter._sharded_param_data
    is_full = data.untyped_storage().nbytes() == data.nbytes and list(sizes) == [data.numel()]
    needs_copy = dtypes != [data.dtype] or data.device != device or hasattr(data, "fsdp_pre_all_gather")
    if not is_full or needs_copy:
        original(sizes, dtypes, ranks, device)
    elif not _is_shard(parameter):
        parameter.all_gather_outputs = [data]
        vars(parameter).pop("_unsharded_param", None)  # the attribute refers to a copy, or to the weights before a move


def _is_shard(parameter: Any) -> bool:
    """Whether the output of the all-gather is the shard, instead of a copy."""
    outputs = parameter.all_gather_outputs
    return len(outputs) == 1 and outputs[0] is parameter._sharded_param_data


def _free_copy(parameter: Any, original: Callable[[], None]) -> None:
    """Free the gathered weights with the `original` method, unless they are the shard."""
    if not _is_shard(parameter):
        original()


def _take_gradients(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    """Move gradients from the gathered weights of `group` to its shards, and cast them to the shards' dtype.

    Everything is enqueued on the compute stream, where autograd wrote these gradients and where clipping and the
    optimizer read the shards' gradients. The order on this stream is sufficient, so no event is recorded, and
    the allocator may reuse the memory of a gathered weight's gradient once it is no longer referenced.
    """
    for parameter in group.fsdp_params if group.reduce_grads else ():
        gathered = getattr(parameter, "_unsharded_param", None)
        if gathered is None or not _stays_on_compute_stream(parameter):
            continue
        # If gradients of earlier micro-batches were not reduced, their sum is kept in the dtype of reductions.
        parameter.accumulate_unsharded_grad_if_needed()
        if parameter.unsharded_accumulated_grad is not None:
            grad = parameter.unsharded_accumulated_grad_data
            parameter.unsharded_accumulated_grad = None
        elif gathered.grad is not None:
            grad = parameter.unsharded_grad_data
            gathered.grad = None
        else:
            continue
        shard = parameter.sharded_param
        grad = grad.to(shard.dtype)
        if shard.grad is None:
            shard.grad = parameter.to_sharded_dtensor(grad.contiguous())
        else:
            shard.grad._local_tensor.add_(grad)
    post_backward(*unused)  # reduces the remaining gradients, and frees gathered copies


def _stays_on_compute_stream(parameter: Any) -> bool:
    """Whether all work on the gradients of `parameter` runs on the compute stream.

    The answer is the same in all micro-batches, so a shard's gradient is never written by two streams in one step.
    torch copies the gradients of offloaded shards on its reduce-scatter stream, and calls hooks there.
    """
    has_hooks = bool(parameter.sharded_param._post_accumulate_grad_hooks)
    is_offloaded = parameter.offload_to_cpu and parameter.device.type != "cpu"
    return not has_hooks and not is_offloaded


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no data, as in a dry run."""
    return isinstance(tensor, FakeTensor)


def abort_groups() -> None:
    """Abort all process groups immediately, including collectives in progress."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def can_split(group: Any, device: torch.device) -> bool:
    """Whether subgroups can share the connections of a process group on `device`."""
    return group.bound_device_id is not None and bool(group._get_backend(device).supports_splitting)


def register_fake_collectives() -> None:
    """Register the backend `fake` for `init_process_group`."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - the import registers the backend


def register_device(name: str, module: Any, fused: Sequence[str]) -> None:
    """Register `torch.device(name)` as a device for fake tensors, until the process ends.

    `fused` names aten operators that have a single kernel on this device, so that torch does not decompose them.
    """
    if torch._C._get_privateuse1_backend_name() == name:
        return
    _setup_privateuseone_for_python_backend(name, module)
    for operator in fused:
        _KERNELS.impl(operator, _no_kernel, "PrivateUse1")


def _no_kernel(*_: Any) -> None:
    """Raise an error, because a fake tensor never runs a kernel."""
    raise AssertionError("a tensor on the device of a dry run is not a fake tensor")


_KERNELS = torch.library.Library("aten", "IMPL")


@contextmanager
def tensors_built_on_host() -> Iterator[None]:
    """Context manager: `torch.tensor(list, device=...)` builds a CPU tensor and then moves it to the device.

    A dispatch mode then receives both operators.
    """
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def within_shard_propagation(sharded: Any, scope: Callable[[], AbstractContextManager[None]]) -> list[Replacement]:
    """Return replacements (see `replaced`) that enter `scope()` when DTensor runs operators only to infer metadata.

    `sharded` is the class DTensor.
    """
    propagator = type(sharded._op_dispatcher.sharding_propagator)
    names = [name for name in dir(propagator) if name.startswith("_propagate_tensor_meta")]
    assert names, "torch has renamed these methods"

    replacements = []
    for name in names:
        method = _within(getattr(propagator, name), lambda *_: scope())
        replacements.append((propagator, name, method))
    return replacements


def within_fsdp(scope: Callable[[str, Sequence[str]], AbstractContextManager[None]]) -> list[Replacement]:
    """Return replacements (see `replaced`) that enter `scope(work, axes)` while FSDP2 works on a unit.

    `work` is "gather", "reduce" or "accumulate", and `axes` are the mesh axes along which the unit is sharded.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    def enter(work: str, owner: Any, *_: Any) -> AbstractContextManager[None]:
        unit = owner[0] if isinstance(owner, list) else owner  # a list of parameters, a parameter, or a parameter group
        return scope(work, unit.mesh_info.mesh.mesh_dim_names or ())

    methods = [
        (_fsdp_param_group.FSDPParamGroup, "unshard", "gather"),
        (_fsdp_param_group.FSDPParamGroup, "wait_for_unshard", "gather"),
        (_fsdp_param_group, "foreach_reduce", "reduce"),
        (_fsdp_param_group.FSDPParam, "accumulate_unsharded_grad_if_needed", "accumulate"),
        (_fsdp_param_group.FSDPParam, "to_accumulated_grad_if_needed", "accumulate"),
    ]
    replacements = []
    for owner, name, work in methods:
        method = _within(getattr(owner, name), partial(enter, work))
        replacements.append((owner, name, method))
    return replacements


def _within(function: Callable[..., Any], enter: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
    """Return a version of `function` that runs inside the context manager `enter(*args)`."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with enter(*args):
            return function(*args, **kwargs)

    return run


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensor arguments that an operator modifies in place, according to its schema."""
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    written = [named.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run flash attention on the CPU, and return the output and `lse [1, heads, queries]`.

    `q`, `k` and `v` are `[1, heads, tokens, width]` with any strides; `k` and `v` may have fewer heads. None of them
    may be empty, as the process would crash. `causal` aligns the first query with the first key. `mask` is added to the
    logits and has the dtype of `q`.
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
    """Return the gradients of `q`, `k` and `v` for `flash_cpu`."""
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return dq, dk, dv


@dataclass(frozen=True)
class Varlen:
    """Offsets of packed sequences, and an attention window aligned at the last query and key of each sequence."""

    cu_q: torch.Tensor  # [sequences + 1], int32, offsets of queries
    cu_k: torch.Tensor  # [sequences + 1], int32, offsets of keys
    max_q: int  # number of queries of the longest sequence
    max_k: int  # number of keys of the longest sequence
    left: int  # -1 for no limit
    right: int  # -1 for no limit

    @property
    def is_causal(self) -> bool:
        """Whether queries attend to all earlier keys and to no later keys."""
        return (self.left, self.right) == (-1, 0)


def flash_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen: Varlen, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run flash attention on the device, and return the output and `lse [heads, queries]`.

    `q`, `k` and `v` are `[tokens, heads, width]`; `k` and `v` may have fewer heads.
    `torch.nn.attention.varlen.varlen_attn` passes the same arguments to this kernel.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        varlen.cu_q,
        varlen.cu_k,
        varlen.max_q,
        varlen.max_k,
        0.0,  # dropout
        varlen.is_causal,
        False,  # do not return the mask
        scale=scale,
        window_size_left=varlen.left,
        window_size_right=varlen.right,
    )
    return out, lse


def flash_cuda_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    varlen: Varlen,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `q`, `k` and `v` for `flash_cuda`."""
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state for dropout; the probability is 0
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse,
        varlen.cu_q,
        varlen.cu_k,
        varlen.max_q,
        varlen.max_k,
        0.0,  # dropout
        varlen.is_causal,
        rng_state,
        torch.empty(0, device=q.device),
        scale=scale,
        window_size_left=varlen.left,
        window_size_right=varlen.right,
    )
    return dq, dk, dv


class Recomputation:
    """State that a recomputed block shares with the modules inside it.

    Modules use it to keep results, so that recomputation does not compute them a second time.
    """

    def __init__(self) -> None:
        self.is_aside = False  # while True, selective recomputation neither saves nor replays results
        self._results: deque[Any] | None = None  # results of `once` in the current block; None outside a block
        self._is_again = False  # whether the current block is being recomputed
        self._is_selective = False  # whether the current block is recomputed selectively
        self.is_for_gradients = False  # while True, only the autograd graph of a result is used, not its values

    def for_gradients(self) -> AbstractContextManager[None]:
        """Return a context manager in which `is_for_gradients` is True."""
        return replaced((self, "is_for_gradients", True))

    def once(self, compute: Callable[[], T], large: bool = False) -> T:
        """Return `compute()` or, during recomputation, the result of the first call.

        Selective recomputation keeps all results. Full recomputation keeps only results that are not `large`, and
        computes the others again.
        """
        if self._results is None or (large and not self._is_selective):
            return compute()
        if self._is_again:
            first_result: T = self._results.popleft()
            return first_result
        with self.aside():
            result = compute()
        self._results.append(result)
        return result

    def aside(self) -> AbstractContextManager[None]:
        """Return a context manager in which selective recomputation ignores all operators."""
        return replaced((self, "is_aside", True))

    def contexts(self, policy: Callable[..., CheckpointPolicy] | None) -> tuple[Any, Any]:
        """Return the contexts of the forward pass and of recomputation, for `context_fn` of `checkpoint`.

        With a `policy`, torch's modes save the results that the policy selects. They cannot save all-to-alls, because
        these write into an argument. Subclasses of these modes save them.
        """
        results: deque[Any] = deque()
        is_selective = policy is not None
        forward = self._block_context(results, is_again=False, is_selective=is_selective)
        recompute = self._block_context(results, is_again=True, is_selective=is_selective)
        if policy is None:
            return forward, recompute

        saving_mode, replaying_mode = create_selective_checkpoint_contexts(policy)
        saving_mode.__class__ = _SavingMode
        replaying_mode.__class__ = _ReplayingMode
        received: deque[torch.Tensor] = deque()
        for mode in (saving_mode, replaying_mode):
            mode.recomputation = self
            mode.received = received
        return both(forward, saving_mode), both(recompute, replaying_mode)

    def _block_context(self, results: deque[Any], is_again: bool, is_selective: bool) -> AbstractContextManager[None]:
        """Return a context manager for the forward pass of a block, or for its recomputation."""
        return replaced(
            (self, "_results", results),
            (self, "_is_again", is_again),
            (self, "_is_selective", is_selective),
        )


@contextmanager
def both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Context manager: enter `outer`, then `inner`."""
    with outer, inner:
        yield


class _SteppingAside(TorchDispatchMode):
    """Base class of the modes of selective recomputation.

    While `is_aside` is set, it ignores operators. It passes all-to-alls to `exchange`.
    """

    recomputation: Recomputation
    received: deque[torch.Tensor]  # outputs of the all-to-alls of a block, in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recomputation.is_aside:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.alltoall_base_.default:
            return self.exchange(func, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def exchange(self, func: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the all-to-all `func`, or replay its result."""
        raise NotImplementedError


class _SavingMode(_SteppingAside, _CachingTorchDispatchMode):
    """Mode of the forward pass that saves the outputs of all-to-alls."""

    def exchange(self, func: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = func(output, *args, **kwargs)
        self.received.append(output.detach())  # do not keep `work`, which keeps the sent tensor alive
        return work


class _ReplayingMode(_SteppingAside, _CachedTorchDispatchMode):
    """Mode of recomputation that returns the saved outputs of all-to-alls instead of communicating."""

    def exchange(self, func: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output.copy_(self.received.popleft())
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result([])
        return _create_work_from_future(done).boxed()  # a handle that is already complete


def named_range(name: str) -> AbstractContextManager[Any]:
    """Return a named range for the profiler.

    `torch.profiler.record_function` is not used, because it takes 20 times as long. It is also an operator, so the
    modes of selective recomputation would record it.
    """
    profiler_range: AbstractContextManager[Any] = _RecordFunctionFast(name)
    return profiler_range


def runs_as_graph(module: torch.nn.Module) -> bool:
    """Whether the user has compiled `module` with torch.compile."""
    return (
        "_orig_mod" in module._modules  # an attribute of the result of `torch.compile(module)`
        or module._compiled_call_impl is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


class Compilations:
    """Context manager around one call of compiled code. It collects the reasons why compilations failed."""

    def __init__(self) -> None:
        # Code that cannot be compiled runs eagerly, and floats (epsilons, scales) are constants of a graph.
        self._settings = torch._dynamo.config.patch(suppress_errors=True, specialize_float=True)
        self._frames = self._failed = 0
        self._reasons: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._frames, self._failed = _frames()
        self._reasons = _reasons()
        self._settings.__enter__()

    def __exit__(self, *_: object) -> None:
        self._settings.__exit__(None, None, None)

    def failure_reasons(self) -> list[str]:
        """Return the reasons for graph breaks and failed compilations in the last call."""
        frames, failed = _frames()
        if frames == self._frames:
            return []
        reasons = list(_reasons() - self._reasons)
        if failed > self._failed and not reasons:
            failures = [metrics for metrics in get_compilation_metrics() if metrics.fail_type]
            if failures:
                reasons.append(f"{failures[-1].fail_type}: {failures[-1].fail_reason}")
            else:
                reasons.append("torch does not report the reason")
        return reasons


def _frames() -> tuple[int, int]:
    """Return the number of functions that torch.compile has tried to compile, and the number of failures."""
    frames = counters["frames"]
    return frames["total"], frames["total"] - frames["ok"]


def _reasons() -> Counter[str]:
    """Return the reasons for all graph breaks so far, with their counts."""
    return Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def build_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any], backend: str) -> Callable[..., Any]:
    """Compile a graph of torch.compile and its backward pass.

    The backward pass is compiled now, so that its errors are raised while an eager fallback is still possible. Random
    numbers are the same as without compilation.
    """
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        if backend == "inductor":
            from torch._inductor.compile_fx import compile_fx

            compiled: Any = compile_fx(graph, inputs, config_patches={"fallback_random": True})
        else:
            compiled = lookup_backend(backend)(graph, list(inputs))
    run: Callable[..., Any] = compiled
    return run


def missing_compiler() -> str | None:
    """Return the reason why graphs cannot be compiled for CPUs on this machine, or None if they can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error).splitlines()[0]
    return None
