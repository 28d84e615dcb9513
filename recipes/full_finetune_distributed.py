"""Full fine-tuning on several devices: torchtune's recipe of the same name, with adaptive batching.

To launch from a checkout:
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/full_finetune_distributed.py --config <config> ...

To launch from an installed package, in any directory:
    tune run --nproc_per_node 2 adaptive_batching/recipes/full_finetune_distributed.py --config <config> ...
"""

import sys

from omegaconf import DictConfig
from torchtune import config
from torchtune.training.checkpointing._checkpoint_client import TrainingProgress

from adaptive_batching.torchtune import AdaptiveBatching, ManyDevices, load_stock, run_recipe

stock = load_stock("full_finetune_distributed")


class FullFinetuneRecipeDistributed(AdaptiveBatching, ManyDevices, stock.FullFinetuneRecipeDistributed):  # type: ignore[name-defined]
    """Stock's full fine-tuning."""

    def save_checkpoint(self, epoch: int) -> None:
        self._checkpoint_client.save_checkpoint(
            model=self._model,
            optimizer=self._optim_ckpt_wrapper if self._optimizer_in_bwd else self._optimizer,
            training_progress=TrainingProgress(
                seed=self.seed,
                epochs_run=self.epochs_run,
                total_epochs=self.total_epochs,
                max_steps_per_epoch=self.max_steps_per_epoch,
                dataloader_state_dict=self._dataloader.state_dict(),
            ),
            epoch=epoch,
        )


@config.parse
def recipe_main(cfg: DictConfig) -> None:
    run_recipe(FullFinetuneRecipeDistributed, cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
