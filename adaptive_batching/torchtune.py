"""Adaptive batching for torchtune's recipes: what a recipe file is made of, and what a recipe of your own overrides.

Another loss is an :class:`Objective`, which defines a sample's tokens and size, a part's share of the gradient, and the
loss. This recipe penalizes large weights of the output layer::

    from adaptive_batching.torchtune import NextToken, entry_point, recipe


    class WithPenalty(NextToken):
        def loss(self, model, batch, weight):
            loss, sums = super().loss(model, batch, weight)
            share = sums.tokens if weight is None else weight  # the parts of a batch share its weight
            return loss + share * 1e-4 * model.output.weight.pow(2).mean(), sums


    def with_penalty(parts):
        return WithPenalty(parts.collate, parts.loss, parts.activations, parts.num_chunks)


    Recipe = recipe("full_finetune_single_device", with_penalty)
    recipe_main = entry_point(Recipe)

    if __name__ == "__main__":
        recipe_main()

A :class:`Watcher` is notified of what happens, and changes nothing. It needs a field that is set, such as
``adaptive_batching.recover_from_oom=True``. This one says so when a step had to run again::

    from adaptive_batching.torchtune import Watcher, entry_point, recipe


    class Alarm(Watcher):
        def step(self, epoch, step, samples, loss, lr, recoveries=0):
            if recoveries:
                print(f"step {step}: {recoveries} recoveries so far")


    class Watched(recipe("lora_finetune_single_device")):
        def __init__(self, cfg):
            super().__init__(cfg)
            self.watchers.append(Alarm())


    recipe_main = entry_point(Watched)

    if __name__ == "__main__":
        recipe_main()

``adaptive-batching run`` takes the path of either file.
"""

from adaptive_batching._report.events import StepCost, Watcher
from adaptive_batching._torchtune.cli.launch import entry_point, run_recipe
from adaptive_batching._torchtune.ppo.ppo_recipe import AdaptivePPO
from adaptive_batching._torchtune.ppo.ppo_settings import check_ppo_settings
from adaptive_batching._torchtune.recipe_classes import recipe
from adaptive_batching._torchtune.stock.checkpoints import BatchStateInCheckpoint, ThroughClient
from adaptive_batching._torchtune.stock.loading import load_stock
from adaptive_batching._torchtune.stock.losses import (
    NextToken,
    accept_configs_of_torchao,
    distillation,
    fake_quantized,
    preferences,
)
from adaptive_batching._torchtune.stock.many_devices import ManyDevices, start_process_group
from adaptive_batching._torchtune.stock.objective import Counts, Objective, Sums
from adaptive_batching._torchtune.train.recipe import AdaptiveBatching

__all__ = [
    "AdaptiveBatching", "AdaptivePPO", "BatchStateInCheckpoint", "Counts", "ManyDevices", "NextToken", "Objective",
    "StepCost", "Sums", "ThroughClient", "Watcher", "accept_configs_of_torchao", "check_ppo_settings", "distillation",
    "entry_point", "fake_quantized", "load_stock", "preferences", "recipe", "run_recipe", "start_process_group",
]  # fmt: skip
