"""Full fine-tuning on several devices: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/full_finetune_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/full_finetune_distributed.py --config <config> ...
"""

import sys
from typing import Any

from omegaconf import DictConfig
from torchtune import config, training
from torchtune.training.checkpointing._checkpoint_client import TrainingProgress

from adaptive_batching.torchtune import AdaptiveBatching, ManyDevices, load_stock, run_recipe
from adaptive_batching.torchtune.checkpoints import AsyncCheckpoint
from adaptive_batching.torchtune.gradients import optimizers_of

stock = load_stock("full_finetune_distributed")


class FullFinetuneRecipeDistributed(AdaptiveBatching, ManyDevices, stock.FullFinetuneRecipeDistributed):  # type: ignore[name-defined]
    """Stock's full fine-tuning."""

    def __init__(self, cfg: DictConfig) -> None:
        super().__init__(cfg=cfg)
        self._async = AsyncCheckpoint(self._checkpoint_client) if self._enable_async_checkpointing else None

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        if self._async is not None:
            ckpt_dict[training.DATALOADER_KEY] = self._async.load(
                ckpt_dict[training.EPOCHS_KEY] - 1, optimizers_of(self)
            )
        super()._update_recipe_state(ckpt_dict)

    def save_checkpoint(self, epoch: int) -> None:
        loader_state = self._dataloader.state_dict()
        if self._async is not None and self.epochs_run < self.total_epochs:  # the last one is not asynchronous
            self._async.save(epoch, loader_state, optimizers_of(self))
        self._checkpoint_client.save_checkpoint(
            model=self._model,
            optimizer=self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer,
            training_progress=TrainingProgress(
                seed=self.seed,
                epochs_run=self.epochs_run,
                total_epochs=self.total_epochs,
                max_steps_per_epoch=self.max_steps_per_epoch,
                dataloader_state_dict=loader_state,
            ),
            epoch=epoch,
        )


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(FullFinetuneRecipeDistributed, cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
