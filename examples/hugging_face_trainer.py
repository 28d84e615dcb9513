"""A Hugging Face ``Trainer`` that fills its forwards by tokens, grows its batch, and survives running out of memory.

    pip install '.[examples]'
    python examples/hugging_face_trainer.py

Five small classes to copy and to change: a collator, a sampler and a data loader, a callback, and a ``Trainer``.

- The optimizer sees ``per_device_train_batch_size`` samples, and more from epoch to epoch if ``increase`` says so. The
  learning-rate schedule and the number of steps are laid out for that.
- Before training, real steps of the trainer find how many of the longest samples fit in a forward. From then on a
  forward holds samples of similar length, up to as many tokens, and a batch has as many forwards as it takes.
- If memory runs out all the same, because another process takes some, the same samples run again in smaller forwards.
- ``resume_from_checkpoint`` goes on within an epoch, with the samples that are left of it.

It trains in one process on one device, with models whose loss is a sum or a mean over ``labels``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from adaptive_batching import (
    AdaptiveBatchingConfig,
    AdaptiveStep,
    ConfigError,
    IncreaseFunction,
    growth,
    plan_batch_sizes,
)

IGNORED = -100  # the label of a token that is no target
Features = dict[str, Any]


def length(sample: Features) -> int:
    """Return the tokens of a sample."""
    return len(sample["input_ids"])


class PaddingCollator:
    """Pads ``input_ids`` and ``labels`` to the longest sample of a forward."""

    def __call__(self, samples: list[Features]) -> dict[str, torch.Tensor]:
        def padded(rows: Iterable[Any], value: int) -> torch.Tensor:  # [b, s]
            return pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value)

        return {
            "input_ids": padded((sample["input_ids"] for sample in samples), 0),
            "attention_mask": padded((torch.ones(length(sample), dtype=torch.long) for sample in samples), 0),
            "labels": padded((sample["labels"] for sample in samples), IGNORED),
        }


def steps_of(samples: int, batch_size: int, drop_last: bool) -> int:
    """Return the steps of an epoch of so many samples."""
    return samples // batch_size if drop_last else math.ceil(samples / batch_size)


class GrowingBatches(Sampler[list[int]]):
    """Batches of the indices that a sampler draws, of a size for each epoch.

    The last of an epoch may be smaller, or is left out with ``drop_last``.

    They are a function of ``seed`` and the epoch alone, so that a run that is resumed goes on with those that are left.
    """

    def __init__(self, sampler: Any, sizes: list[int], seed: int = 0, *, drop_last: bool = False) -> None:
        self.sampler = sampler
        self.drop_last = drop_last
        self.sizes = sizes
        self.seed = seed
        self.epoch = 0

    @property
    def batch_size(self) -> int:
        return self.sizes[self.epoch]

    @property
    def steps(self) -> list[int]:
        """Steps of each epoch."""
        return [steps_of(len(self.sampler), size, self.drop_last) for size in self.sizes]

    def place_of(self, step: int) -> tuple[int, int]:
        """Return how many whole epochs are over after ``step`` steps of the run, and how many steps of the next."""
        for epoch, steps in enumerate(self.steps):
            if step < steps:
                return epoch, step
            step -= steps
        return len(self.sizes), 0

    def epochs_after(self, step: int) -> float:
        """Return how many epochs are over after ``step`` steps of the run."""
        epoch, steps = self.place_of(step)
        return epoch + steps / self.steps[epoch] if steps else float(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Take the size and the order of ``epoch``."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps[self.epoch]

    def __iter__(self) -> Iterator[list[int]]:
        self.sampler.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        indices = list(self.sampler)
        for step in range(len(self)):
            yield indices[step * self.batch_size : (step + 1) * self.batch_size]


class SampleLoader(DataLoader[Features]):
    """Hands out the samples of a batch as they are: they are collated when they run, in parts that fit."""

    def __init__(self, data: Any, batches: GrowingBatches, **settings: Any) -> None:
        self.batches = batches
        super().__init__(data, batch_sampler=batches, collate_fn=list, **settings)

    def set_epoch(self, epoch: int) -> None:
        """Take the size of ``epoch``; ``Trainer`` calls this."""
        self.batches.set_epoch(epoch)


class AdaptiveCallback(TrainerCallback):
    """Probes once everything is on its device, and keeps count of the epoch."""

    def __init__(self, trainer: AdaptiveTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.prepare(kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Trainer takes all epochs to have as many steps.
        state.epoch = kwargs["train_dataloader"].batches.epochs_after(state.global_step)


class AdaptiveTrainer(Trainer):
    """A ``Trainer`` whose optimizer step is an :class:`~adaptive_batching.AdaptiveStep`.

    Args:
        increase: An increase function, asked at the start of each epoch; None for batches of one size.
        max_batch_size: The size that a growing batch stays within; None for the number of samples.
        max_tokens: Padded tokens of a forward; None to probe how many fit.
        settings: Settings of the probe, such as ``memory_limit``.

    Raises:
        ConfigError: If a setting of ``Trainer`` cannot be used with it.
    """

    def __init__(
        self,
        *args: Any,
        increase: IncreaseFunction | None = None,
        max_batch_size: int | None = None,
        max_tokens: int | None = None,
        settings: AdaptiveBatchingConfig = AdaptiveBatchingConfig(round_to_power_of_two=False),  # noqa: B008
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.step: AdaptiveStep[Features] | None = None
        self._increase = growth.constant() if increase is None else increase
        self._max_batch_size = max_batch_size
        self._max_tokens = max_tokens
        self._settings = settings
        if self.args.gradient_accumulation_steps > 1:
            raise ConfigError(
                f"gradient_accumulation_steps={self.args.gradient_accumulation_steps} must be 1: set "
                f"per_device_train_batch_size to all samples of a step, which runs in as many forwards as it takes"
            )
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise ConfigError("AdaptiveTrainer trains on one device; set CUDA_VISIBLE_DEVICES to one of them")
        if not self.model_accepts_loss_kwargs:
            raise ConfigError(f"{type(self.model).__name__} takes no num_items_in_batch, so its losses are not summed")
        if getattr(self.args, "train_sampling_strategy", None) == "batch_rebalance":  # not in transformers 5.0
            raise ConfigError("train_sampling_strategy='batch_rebalance' makes batches of its own; use another")
        if not hasattr(self.train_dataset, "__len__"):
            raise ConfigError(f"train_dataset is a {type(self.train_dataset).__name__}, which has no length; give one")
        self.add_callback(AdaptiveCallback(self))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint and not hasattr(Trainer, "_init_training_state"):
            raise ConfigError("resume_from_checkpoint: with batches that may grow, it takes transformers 5.3 or later")
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_train_dataloader(self) -> SampleLoader:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = self._get_train_sampler(self.train_dataset)
        self._batches = GrowingBatches(sampler, self._sizes(), seed, drop_last=self.args.dataloader_drop_last)
        return SampleLoader(self.train_dataset, self._batches, num_workers=self.args.dataloader_num_workers)

    def set_initial_training_values(self, args: Any, dataloader: SampleLoader, *more: Any) -> Any:
        """Lay out the run for the sizes of its epochs, the first of which has most steps."""
        _, *values, max_steps = super().set_initial_training_values(args, dataloader, *more)
        *whole, last = dataloader.batches.steps
        if args.max_steps <= 0:  # of the last epoch, a part may be asked for
            max_steps = sum(whole) + math.ceil((args.num_train_epochs - len(whole)) * last)
        return (len(whole) + 1, *values, max_steps)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the epoch to go on in, and its steps that are over; ``Trainer`` takes epochs to be equally long."""
        super()._init_training_state(*args, **kwargs)
        step, epochs = self.state.global_step, self.state.epoch
        if step and epochs != self._batches.epochs_after(step):
            raise ConfigError(
                f"resume_from_checkpoint: {epochs:.3f} epochs were over after step {step}, and would be "
                f"{self._batches.epochs_after(step):.3f} with the batch sizes of this run; resume with the data, "
                f"per_device_train_batch_size, increase and max_batch_size that it began with"
            )
        epoch, steps = self._batches.place_of(step)
        self._batches.set_epoch(min(epoch, len(self._batches.sizes) - 1))  # before its first steps are left out
        return epoch, steps

    def prepare(self, optimizer: Any) -> None:
        """Make the step, and probe how many tokens a forward holds."""
        self._loss_is_a_mean = self._returns_a_mean()
        self.step = AdaptiveStep(
            self.model_wrapped,
            optimizer.optimizer,  # without Accelerate's wrapper, whose steps are counted
            self._losses,
            self.data_collator,
            length=length,
            clip_norm=self.args.max_grad_norm or None,
        )
        self.step.max_tokens = self._max_tokens
        if self._max_tokens is None:
            longest = max(self.train_dataset, key=length)
            found = self.step.find_maximum_batch_size(
                longest, upper=len(self.train_dataset), in_parts=True, settings=self._settings
            )
            self.step.max_tokens = found.batch_size * length(longest)

    def training_step(self, model: Any, inputs: list[Features], num_items_in_batch: Any = None) -> torch.Tensor:
        assert self.step is not None
        model.train()
        return self.step.gradients(inputs, self.accelerator.backward)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.step is not None:
            logs["oom_retries"] = self.step.num_recoveries
        super().log(logs, *args, **kwargs)

    def _losses(self, model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        number = self._get_num_items_in_batch([batch], self.args.device)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, batch, num_items_in_batch=torch.ones_like(number))
        if not self._loss_is_a_mean:
            return loss, number
        return torch.where(number > 0, loss * number, 0 * loss.nan_to_num()), number  # the mean of no target is NaN

    def _returns_a_mean(self) -> bool:
        """Return True if the loss is a mean whatever ``num_items_in_batch`` is, as of T5 and BERT, and no sum."""
        longest: Features = max(self.train_dataset, key=length)
        batch = self._prepare_inputs(self.data_collator([dict(longest)]))
        number = self._get_num_items_in_batch([batch], self.args.device)
        if not isinstance(number, torch.Tensor):
            raise ConfigError(f"data_collator={type(self.data_collator).__name__} makes no labels; add labels to count")
        model, losses = self.model_wrapped.eval(), []  # without dropout, both losses are of the same forward
        for divisor in (torch.ones_like(number), 2 * torch.ones_like(number)):
            with torch.no_grad(), self.compute_loss_context_manager():
                losses.append(self.compute_loss(model, dict(batch), num_items_in_batch=divisor))
        once, halved = losses
        is_a_mean = torch.allclose(halved, once, rtol=1e-3, equal_nan=True) and bool(once != 0)
        if not is_a_mean and not torch.allclose(2 * halved, once, rtol=1e-3):
            raise ConfigError(
                f"the loss of {type(model).__name__} is neither a sum over num_items_in_batch nor a mean, but has "
                f"terms of both kinds; train it without those that balance experts, for example"
            )
        return is_a_mean

    def _sizes(self) -> list[int]:
        """Return the size of each epoch, of as many as ``max_steps`` take if it is set."""
        samples, epochs, wanted = len(self.train_dataset), math.ceil(self.args.num_train_epochs), self.args.max_steps
        start = min(self.args.per_device_train_batch_size, samples)
        maximum = min(self._max_batch_size or samples, samples)  # else drop_last could leave an epoch without a step
        while True:
            sizes = plan_batch_sizes(start, self._increase, epochs=epochs, samples=samples, maximum=maximum)
            steps = [steps_of(samples, size, self.args.dataloader_drop_last) for size in sizes]
            if wanted <= sum(steps):
                return sizes
            epochs += math.ceil((wanted - sum(steps)) / steps[-1])


def make_model() -> LlamaForCausalLM:
    """Return a small model with random weights."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, pad_token_id=0, **sizes))


def make_data(num_samples: int = 64) -> list[Features]:
    """Return samples of many lengths that count up from a random number, which is the prompt, and no target."""
    chance = random.Random(0)
    data = []
    for _ in range(num_samples):
        start, num_tokens = chance.randrange(1, 64), chance.randrange(4, 60)
        ids = [(start + i) % 128 for i in range(num_tokens)]
        data.append({"input_ids": ids, "labels": [IGNORED, *ids[1:]]})
    return data


def main() -> None:
    """Train the small model, with a batch that doubles each epoch."""
    args = TrainingArguments(
        output_dir="outputs/hugging_face_trainer",
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=3e-3,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = AdaptiveTrainer(
        make_model(),
        args,
        train_dataset=make_data(),
        data_collator=PaddingCollator(),
        increase=growth.step(every=1, gamma=2),
    )
    trainer.train()


if __name__ == "__main__":
    main()
