"""One set of compiled graphs for all blocks of a kind (`train.compile`), and what happens where there can be none.

torch.compile keeps graphs by the code of a function. Blocks that run the same code, with weights of the same shapes,
share them: weights are arguments of a graph. Lengths are symbols, so that no pack needs graphs of its own. What talks
to other ranks, or has Python of its own to run in each step, is an `edge`: one graph ends before it, the next begins
after it, and it runs as it does without compilation.
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
# Of one piece of code of a kind: layers with other attributes (a window), with gradients and without, training and
# evaluation, inputs that need a gradient or not, no row, one, and many. torch stops at 8 by default.
MOST_GRAPHS = 32
COMPILED = "_omnizoo_compiled"  # a mark


def edge(function: F) -> F:
    """A function that graphs end at."""
    made: F = torch.compiler.disable(function, reason=EDGE)
    return made


def make_edge(module: nn.Module) -> None:
    """Let graphs end at calls of `module`, with all its hooks: those of FSDP cannot be in a graph. torch looks for
    `__call__` in the class, so it gets one of its own, as FSDP gives it one."""
    module.__class__ = _ending_graphs(type(module))  # type: ignore[arg-type]  # classes can be keys


@cache
def _ending_graphs(kind: type[nn.Module]) -> type[nn.Module]:
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__call__": edge(kind.__call__), **named})


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` is a block with graphs."""
    return COMPILED in vars(module)


class Kind:
    """The graphs of all modules of a kind: `kind(module, ...)` is `forward(module, ...)`."""

    def __init__(self, name: str, forward: Callable[..., Any], backend: str) -> None:
        self.name, self.backend = name, backend
        self.graphs = 0  # so far
        self.failure: str | None = None  # why it is not compiled
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
        except RestartAnalysis:  # it will come again with another graph
            raise
        except Exception as error:  # noqa: BLE001 - whatever a compiler stumbles over: the graph runs without it, too
            self._fail(f"{type(error).__name__}: {error}")
            return graph.forward

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            lines = [line.strip() for line in reason.splitlines()]
            self.failure = " ".join(line for line in lines[:2] if line)[:500]
            log.warning("train.compile: %s runs without compilation: %s", self.name, self.failure)


class Kinds:
    """All kinds of a model. `backend`: what makes code of graphs, by torch's names."""

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend
        self._kinds: dict[Any, Kind] = {}

    def of(self, module: nn.Module, forward: Callable[..., Any]) -> Kind:
        """That of modules like this one, for `forward(module, ...)`."""
        shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters())
        key = type(module), forward, shapes
        if key not in self._kinds:
            self._kinds[key] = Kind(type(module).__name__, forward, self.backend)
        return self._kinds[key]

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds.values())

    def __len__(self) -> int:
        return len(self._kinds)


class Compiled:
    """The forward of a block whose kind has graphs."""

    def __init__(self, block: nn.Module, kind: Kind) -> None:
        self.kind, self.eager, self._run = kind, block.forward, partial(kind, block)

    def chosen(self) -> Callable[..., Any]:
        """What runs now. A recomputation has to run what the forward pass has run, though the kind may have failed in
        between."""
        return self._run if self.kind.failure is None else self.eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.chosen()(*args, **kwargs)
