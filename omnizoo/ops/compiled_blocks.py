"""Compile blocks (`train.compile`). Blocks of a kind share one set of graphs, and run eagerly if compilation fails.

torch.compile caches graphs by the code of a function. Blocks that run the same code with weights of the same shapes
share graphs, because weights are arguments of a graph. Lengths are symbolic, so a new pack length needs no new graph.
Functions that use collectives, or run Python code in each step, are graph breaks: one graph ends before them, the next
one begins after them, and they run without compilation.
"""

import logging
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn

from omnizoo.ops.torch_private import Compilations, RestartAnalysis, build_graph

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

GRAPH_BREAK_REASON = "an intended graph break of OmniZoo"
# Maximum number of graphs per code object of a kind. torch builds a separate graph for each combination of layer
# attributes (such as a window), gradients on or off, training or evaluation, inputs that require a gradient or not, and
# zero, one or many rows. The default of torch is 8.
MAX_GRAPHS = 32
COMPILED = "_omnizoo_compiled"  # name of the attribute that marks compiled blocks


def graph_break(function: F) -> F:
    """Return a version of `function` that is never compiled. Calling it from compiled code breaks the graph."""
    uncompiled: F = torch.compiler.disable(function, reason=GRAPH_BREAK_REASON)
    return uncompiled


def make_graph_break(module: nn.Module) -> None:
    """Exclude calls of `module` and its hooks from graphs, because the hooks of FSDP cannot be part of a graph.

    torch looks up `__call__` in the class, so the class of the module is replaced with a new subclass of it. FSDP does
    the same.
    """
    module.__class__ = _graph_break_class(type(module))  # type: ignore[arg-type]  # classes can be keys


@cache
def _graph_break_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `base` with the same name. Its `__call__` is a graph break."""
    attributes = {
        "__call__": graph_break(base.__call__),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (base,), attributes)


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` is a compiled block."""
    return COMPILED in vars(module)


class CompiledKind:
    """The graphs of all modules of one kind. Calling a kind with a module computes `forward(module, ...)`."""

    def __init__(self, name: str, forward: Callable[..., Any], backend: str) -> None:
        self.name = name
        self.backend = backend
        self.graphs = 0  # number of graphs built so far
        self.failure: str | None = None  # reason why the first compilation failed
        self._compilations = Compilations()
        # Passed as a dict, because torch's stubs lack these options.
        options: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": MAX_GRAPHS}
        self._run = torch.compile(forward, backend=self._build, dynamic=True, **options)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._compilations:
            out = self._run(module, *args, **kwargs)
        reasons = self._compilations.failure_reasons()
        unintended = [reason for reason in reasons if GRAPH_BREAK_REASON not in reason]
        if unintended:
            self._fail(unintended[0])
        return out

    def _build(self, graph: Any, inputs: Any) -> Any:
        """Compile one graph, or return its eager code if that fails. This is the backend of `torch.compile`."""
        self.graphs += 1
        try:
            return build_graph(graph, inputs, self.backend)
        except RestartAnalysis:  # torch.compile will retry with another graph
            raise
        except Exception as error:  # noqa: BLE001 - compilers raise errors of many types; the graph then runs eagerly
            self._fail(f"{type(error).__name__}: {error}")
            return graph.forward

    def _fail(self, reason: str) -> None:
        """Record the first failure and log it. Blocks of this kind run without compilation from then on."""
        if self.failure is not None:
            return
        lines = [line.strip() for line in reason.splitlines()]
        self.failure = " ".join(line for line in lines[:2] if line)[:500]
        log.warning("train.compile: %s runs without compilation: %s", self.name, self.failure)


class Kinds:
    """All kinds of compiled blocks of a model. `backend` is the name of a torch.compile backend."""

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend
        self._kinds: dict[Any, CompiledKind] = {}

    def kind_of(self, module: nn.Module, forward: Callable[..., Any]) -> CompiledKind:
        """Return the kind of `module`. It contains all modules with the same class, `forward` and parameter shapes."""
        parameters = []
        for name, parameter in module.named_parameters():
            parameters.append((name, tuple(parameter.shape), parameter.requires_grad))
        key = type(module), forward, tuple(parameters)
        if key not in self._kinds:
            self._kinds[key] = CompiledKind(type(module).__name__, forward, self.backend)
        return self._kinds[key]

    def __iter__(self) -> Iterator[CompiledKind]:
        return iter(self._kinds.values())

    def __len__(self) -> int:
        return len(self._kinds)


class Compiled:
    """Replacement for the `forward` of a block.

    It runs the compiled graphs that all blocks of the same kind share, or the eager `forward` if compilation failed.
    """

    def __init__(self, block: nn.Module, kind: CompiledKind) -> None:
        self.kind = kind
        self.eager = block.forward
        self._run_compiled = partial(kind, block)

    def current(self) -> Callable[..., Any]:
        """Return the function to run now.

        If a block is recomputed, keep this function for its recomputation. The forward pass and recomputation must run
        the same function, but compilation may fail in between.
        """
        return self._run_compiled if self.kind.failure is None else self.eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.current()(*args, **kwargs)
