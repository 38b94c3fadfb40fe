"""The `Balancer`: it assigns the packs and media items of a step to ranks by cost, and sends them there."""

from functools import partial

from torch import nn

from omnizoo.balancing.pack_cost import PackCost
from omnizoo.balancing.redistribute import redistribute
from omnizoo.balancing.step_data import StepData
from omnizoo.config.schema import Config
from omnizoo.data.loading.lane_stream import LoadedStep, LoadingStopped
from omnizoo.data.packing.kto_baseline import split_kto_baseline
from omnizoo.models.media.hf_model import media_model
from omnizoo.parallel.errors import raise_first
from omnizoo.parallel.exchange import ProcessGroup
from omnizoo.parallel.mesh import Mesh


class Balancer:
    """Distributes the packs and media items that the ranks have loaded, so that all ranks have about the same cost.

    Example:
        >>> balancer = omnizoo.Balancer(model, mesh, config)
        >>> data = balancer(loaded_step)
    """

    def __init__(self, model: nn.Module, mesh: Mesh, config: Config) -> None:
        """Determine the ports of the model and the FLOPs of its components.

        Args:
            model: The model that will process the packs. It may be sharded.
            mesh: The ranks to distribute packs over.
            config: Its `train.micro_batch` is the default number of packs per micro-batch.
        """
        self.mesh = mesh
        self.pack_cost = PackCost(model)
        self._ports_by_call = media_model(model).ports_by_call
        self._micro_batch = config.train.micro_batch
        self._has_kto_baseline = config.mismatched_answers

    def __call__(
        self, loaded: LoadedStep, group: ProcessGroup | None = None, micro_batch: int | None = None
    ) -> StepData:
        """Send packs and media items to the ranks that will process them. Collective: all ranks must call it.

        Args:
            loaded: The packs that this rank has loaded.
            group: Process group to communicate over. Each thread needs a separate group.
            micro_batch: Number of packs per micro-batch (default: `train.micro_batch`).

        Returns:
            The micro-batches of this rank, and totals over all ranks.

        Raises:
            UserError: If loading failed on any rank. The same error is raised on all ranks.
            LoadingStopped: If any rank received a stop signal before it had loaded the step.
        """
        redistribute_packs = partial(
            redistribute,
            mesh=self.mesh,
            micro_batch=micro_batch or self._micro_batch,
            calls=self._ports_by_call,
            cost=self.pack_cost,
            group=group,
        )
        packs = loaded.packs
        kto_baseline = None
        if self._has_kto_baseline:
            packs, baseline_packs = split_kto_baseline(loaded.packs)
        batches, plan, statuses = redistribute_packs(packs, status=loaded.status())
        if self._has_kto_baseline:
            baseline_batches, baseline_plan, _ = redistribute_packs(baseline_packs)
            kto_baseline = StepData(
                micro_batches=baseline_batches,
                totals=baseline_plan.totals,
                imbalance=baseline_plan.imbalance,
            )

        raise_first(status["error"] for status in statuses)
        if any(status["is_stopped"] for status in statuses):
            raise LoadingStopped
        counters = {}
        for name in loaded.counters:
            counters[name] = sum(status["counters"][name] for status in statuses)
        return StepData(
            micro_batches=batches,
            totals=plan.totals,
            imbalance=plan.imbalance,
            counters=counters,
            bad_rows=[message for status in statuses for message in status["bad_rows"]],
            kto_baseline=kto_baseline,
            totals_by_source=plan.totals_by_source,
        )
