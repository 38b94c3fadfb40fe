"""Compilation of blocks (`train.compile`), with one set of graphs for all blocks of a kind, and an eager fallback.

torch.compile caches graphs by the code of a function. Blocks that run the same code with weights of the same shapes
share graphs, because weights are arguments of a graph. Lengths are symbolic, so a new pack length needs no new graph.
Functions that use collectives, or run Python code in each step, are graph breaks ("edges"): one graph ends before them,
the next one begins after them, and they run without compilation.
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

EDGE = "an edge of OmniZoo's graphs"
# Limit of graphs per code object of a kind. Variants are layers with other attributes (such as a window), with and
# without gradients, training and evaluation, inputs that require a gradient or not, and zero, one or many rows. The
# default of torch is 8.
MOST_GRAPHS = 32
COMPILED = "_omnizoo_compiled"  # name of the attribute that marks compiled blocks


def graph_break(function: F) -> F:
    """Return `function` as a graph break: it is never compiled into a graph."""
    made: F = torch.compiler.disable(function, reason=EDGE)
    return made


def make_edge(module: nn.Module) -> None:
    """Make calls of `module` graph breaks, including its hooks, because the hooks of FSDP cannot be part of a graph.

    torch looks up `__call__` in the class, so the module gets a new subclass, as FSDP does it.
    """
    module.__class__ = _ending_graphs(type(module))  # type: ignore[arg-type]  # classes can be keys


@cache
def _ending_graphs(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` with the same name, whose `__call__` is a graph break."""
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__call__": graph_break(kind.__call__), **named})


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` is a compiled block."""
    return COMPILED in vars(module)


class CompiledKind:
    """The graphs of all modules of a kind. Calling it with a module computes `forward(module, ...)`."""

    def __init__(self, name: str, forward: Callable[..., Any], backend: str) -> None:
        self.name, self.backend = name, backend
        self.graphs = 0  # number of graphs built so far
        self.failure: str | None = None  # reason of the first failed compilation
        self._compilations = Compilations()
        options: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": MOST_GRAPHS}  # not in torch's stubs
        self._run = torch.compile(forward, backend=self._build, dynamic=True, **options)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._compilations:
            out = self._run(module, *args, **kwargs)
        trouble = [reason for reason in self._compilations.trouble() if EDGE not in reason]
        if trouble:
            self._fail(trouble[0])
        return out

    def _build(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        try:
            return build_graph(graph, inputs, self.backend)
        except RestartAnalysis:  # torch.compile will retry with another graph
            raise
        except Exception as error:  # noqa: BLE001 - whatever a compiler stumbles over: the graph runs without it, too
            self._fail(f"{type(error).__name__}: {error}")
            return graph.forward

    def _fail(self, reason: str) -> None:
        """Record the first failure and log it. Blocks of this kind run without compilation from then on."""
        if self.failure is None:
            lines = [line.strip() for line in reason.splitlines()]
            self.failure = " ".join(line for line in lines[:2] if line)[:500]
            log.warning("train.compile: %s runs without compilation: %s", self.name, self.failure)


class Kinds:
    """All kinds of compiled blocks of a model. `backend` is the name of a torch.compile backend."""

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend
        self._kinds: dict[Any, CompiledKind] = {}

    def of(self, module: nn.Module, forward: Callable[..., Any]) -> CompiledKind:
        """Return the kind of modules with the class, `forward` and parameter shapes of `module`."""
        shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters())
        key = type(module), forward, shapes
        if key not in self._kinds:
            self._kinds[key] = CompiledKind(type(module).__name__, forward, self.backend)
        return self._kinds[key]

    def __iter__(self) -> Iterator[CompiledKind]:
        return iter(self._kinds.values())

    def __len__(self) -> int:
        return len(self._kinds)


class Compiled:
    """Replacement for the `forward` of a block: runs the graphs of its kind, or eager code if compilation failed."""

    def __init__(self, block: nn.Module, kind: CompiledKind) -> None:
        self.kind, self.eager, self._run = kind, block.forward, partial(kind, block)

    def chosen(self) -> Callable[..., Any]:
        """Return the function to run now.

        Recomputation must run the same function as the forward pass, although compilation may have failed in between.
        """
        return self._run if self.kind.failure is None else self.eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.chosen()(*args, **kwargs)
