"""The optimizer step of a plain PyTorch loop: probed, split by length, and run again when memory runs out."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Generic

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._loop.loss_work import LossWork, nonzero
from adaptive_batching._loop.samples import (
    Loss,
    Sample,
    as_sum,
    collated,
    device_of,
    run_forward,
)
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._probe.find import LARGEST_TRIED, find_largest
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._ranks.agree import num_collectives
from adaptive_batching._ranks.fsdp import end_forward
from adaptive_batching._ranks.gradient_sum import sums_over_ranks
from adaptive_batching._state import State, parameters_of, rehearsal
from adaptive_batching._step.data_parallel import data_parallel_of
from adaptive_batching._step.judge import Audit
from adaptive_batching._step.runner import StepRunner
from adaptive_batching._step.sharing import gathered
from adaptive_batching._values import ConfigError


class AdaptiveStep(Generic[Sample]):
    """One optimizer step on a list of samples, however many of them fit in memory at once.

    The gradient is that of the mean loss over the whole list, up to rounding, however the list is split into parts that
    run one after the other. If a part runs out of memory in forward or backward, the gradients so far are dropped, the
    state of torch's random number generators is put back, and the same samples run again in smaller parts: none is lost
    and none counts twice.

    A batch whose samples depend on each other, as with batch normalisation, is not split.

    In a process group whose ranks train together with DDP or FSDP2, each rank calls it with samples of its own, as many
    as it has, and "all samples" below are those of all ranks. If one of them runs out of memory, all run theirs again.

    Args:
        model: The model, on its device. On several, as ``DistributedDataParallel`` or ``fully_shard`` returns it.
        optimizer: Its optimizer, which may have parameters from elsewhere as well, such as those of the loss.
        loss: Runs the forward pass: (model, batch) -> the sum of the batch's losses, a scalar tensor, and their number,
            which is that of its samples or target tokens, or the sum of their weights. With ``count``, their mean.
        collate: Turns a list of samples into a batch, as the ``collate_fn`` of a :class:`~torch.utils.data.DataLoader`
            does. The batch is moved to the model's device.
        length: Tokens of a sample, before padding. Samples of similar length share a part. None if all samples take the
            same memory; each then counts as one token.
        max_grad_norm: Largest L2 norm of the gradient of all parameters; None to leave it as it is.
        count: Returns the number of losses in a batch, by which ``loss`` is their mean: a part of the samples counts by
            its number. None if ``loss`` returns a sum and its number itself.
        balance_ranks: True to balance the samples of a step over ranks by their lengths where ``max_tokens`` is set:
            some are sent to another rank, and collated there. False to have each compute its own.
        state: Whatever else ``loss`` changes, such as a total that it sums up: objects with ``state_dict`` and
            ``load_state_dict``, which each step saves. It is as before when samples run again, and after checks and
            the probe, as weights, buffers, gradients, optimizer states and random numbers are in any case.

    Raises:
        ConfigError: If an object of ``state`` has no such methods, or several processes train together in another way.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss | Callable[[nn.Module, Any], torch.Tensor],
        collate: Callable[[list[Sample]], Any] = default_collate,
        *,
        length: Callable[[Sample], int] | None = None,
        count: Callable[[Any], torch.Tensor | float] | None = None,
        max_grad_norm: float | None = None,
        balance_ranks: bool = True,
        state: Sequence[Any] = (),
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss: Loss = as_sum(loss, count)
        self._collate = collate
        self._max_grad_norm = max_grad_norm
        self._scale: float | None = None  # by which a backward of the user's multiplies the loss
        self._scaled_by: Any = None  # that backward
        self._knows_forwards_are_local = False
        self._parallel = data_parallel_of(model, lambda: parameters_of(model, [optimizer]))
        declared = State([model], losses={"loss": loss, "count": count}, draws=[collate], listed=state)
        self._work = LossWork(
            model, optimizer, self._loss, collate, length, self._parallel, declared,
            balances_ranks=balance_ranks,
        )  # fmt: skip
        remedy = "have loss return a sum and its number, or set max_tokens=None and a smaller batch"
        audit = Audit(self._work, self._parallel.ranks, remedy)
        self._runner = StepRunner(self._work, self._parallel, audit=audit)

    @property
    def max_tokens(self) -> int | None:
        """Padded tokens that a part holds at most; None for no limit as long as all samples fit at once.

        May be set at any time between steps; a ConfigError if it is below 1.
        """
        return self._work.limit.bound

    @max_tokens.setter
    def max_tokens(self, value: int | None) -> None:
        if value is not None and (not hasattr(value, "__index__") or value < 1):
            raise ConfigError(f"max_tokens={value!r} must be a whole number of at least 1, or None for no limit")
        self._work.limit.bound = None if value is None else operator.index(value)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with: :attr:`max_tokens`, and what running out of memory has taught."""
        return {"max_tokens": self.max_tokens, "limit": self._work.limit.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of another :meth:`state_dict`. Weights and optimizer states are not part of it."""
        self.max_tokens = state["max_tokens"]
        self._work.limit.load_state_dict(state["limit"])

    @property
    def num_recoveries(self) -> int:
        """Number of times that samples have had to run again."""
        return self._work.limit.num_recoveries

    def __call__(
        self, samples: Sequence[Sample], backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    ) -> torch.Tensor:
        """Take one optimizer step on ``samples``, and leave no gradients behind; arguments as for :meth:`gradients`.

        ``backward`` must not scale the loss: a gradient scaler's gradients have to be divided by its scale first.

        Returns:
            The mean loss before the step: a scalar on the model's device, without a graph.

        Raises:
            ConfigError: As for :meth:`gradients`, and if ``backward`` scales the loss.
            DoesNotFitError: As for :meth:`gradients`, and if the optimizer itself runs out of memory; parameters may
                then be updated in part.
        """
        with self._own_gradients():
            loss = self._mean_loss(samples, backward, may_scale=False)
            try:
                clip_and_step(self._model, [self._optimizer], self._max_grad_norm)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise DoesNotFitError(
                    "out of memory in the optimizer's step, which may have updated only some parameters; resume from "
                    "the last checkpoint, and call find_maximum_batch_size before training to make room for it"
                ) from error
        return loss

    def gradients(
        self, samples: Sequence[Sample], backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    ) -> torch.Tensor:
        """Leave the gradient of the mean loss over ``samples`` in the parameters, and take no step.

        The step itself, clipping included, is the caller's. A batch with no losses has gradients of zero. Those of
        parameters that the optimizer does not have are added to what they had before, as a backward pass does. After an
        error the gradients are as before.

        Args:
            samples: All samples of the step, not collated.
            backward: Runs the backward pass of a scalar loss, such as ``accelerator.backward``.

        Returns:
            The mean loss: a scalar on the model's device, without a graph.

        Raises:
            ConfigError: If ``samples`` is collated already, or empty on every rank, processes have joined since the
                step was made, gradients are left over from before, ``loss`` returns something else than a sum and a
                number, ``length`` something else than a whole number, ``backward`` divides the loss, or parts of a
                batch do not add up to it, in losses or gradients.
            DoesNotFitError: If memory runs out and the samples cannot run in smaller parts.
            Exception: Any error of ``loss``, ``collate`` or ``backward``; an error on other ranks repeats it.
        """
        with self._own_gradients():
            return self._mean_loss(samples, backward, may_scale=True)

    def _mean_loss(
        self, samples: Sequence[Sample], backward: Callable[[torch.Tensor], None], *, may_scale: bool
    ) -> torch.Tensor:
        parallel = self._parallel
        parallel.check_size()
        with parallel.without_sync():
            if backward is not torch.Tensor.backward:
                self._check_scale_of(backward, may_scale=may_scale)
            if parallel.roots:
                end_forward(parallel.roots)  # of an evaluation, which leaves parameters gathered
            checked, num_samples, shortest = self._checked_on_all(samples)
            if not num_samples:
                raise ConfigError("samples is empty; a step needs at least one")
            self._work.start_step(checked, shortest[0], num_samples, backward)
            if parallel.ranks.size > 1 or parallel.roots:
                self._look_at_communication(shortest * 2)
            parts, results = zip(*self._runner.step(checked), strict=True)
        losses, numbers = zip(*results, strict=True)
        total: torch.Tensor = torch.stack(losses).sum()
        number: torch.Tensor = reduce(operator.add, numbers)
        if parallel.ranks.size > 1:
            total, number = sums_over_ranks([total, number], total.device)
        number = nonzero(number)
        self._work.note_number(number)
        if parts[0].divisor is not None:  # the same for all parts and ranks
            parallel.sum_gradients(parts[0].divisor / number.item())
        trained = [parameter for parameter in self._work.parameters() if parameter.requires_grad]
        if all(parameter.grad is None for parameter in trained):  # nothing has run backward
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
        return total / number

    @contextlib.contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Lay aside what gradients there are that the optimizer does not clear; an error leaves none but these."""
        of_optimizer = set[nn.Parameter]()
        for group in self._optimizer.param_groups:
            of_optimizer.update(group["params"])
        before: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        others: list[tuple[nn.Parameter, torch.Tensor]] = []
        for parameter in self._work.parameters():
            before.append((parameter, parameter.grad))
            if parameter.grad is not None and parameter not in of_optimizer:
                others.append((parameter, parameter.grad))
                parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, gradient in before:
                parameter.grad = gradient
            raise
        for parameter, gradient in others:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _check_scale_of(self, backward: Callable[[torch.Tensor], None], *, may_scale: bool) -> None:
        """Raise ConfigError if ``backward`` divides the loss, or multiplies it where it may not."""
        code = getattr(backward, "__code__", backward)  # of a lambda, which may be another object in each step
        if self._scale is None or self._scaled_by != code:
            self._scaled_by = code
            one = torch.ones((), device=device_of(self._model), requires_grad=True)
            backward(one * 1.0)
            self._scale = 0.0 if one.grad is None else one.grad.item()
        if self._scale < 0.9:  # as where gradients are accumulated over several calls
            raise ConfigError(
                f"backward multiplies the loss by {self._scale:.3g}, as Accelerator(gradient_accumulation_steps="
                f"{1 / max(self._scale, 1e-9):.3g}) does; leave gradient_accumulation_steps at 1, and give "
                "AdaptiveStep all samples of an optimizer step at once"
            )
        if self._scale > 1.1 and not may_scale:
            raise ConfigError(
                f"backward multiplies the loss by {self._scale:.6g}, as a gradient scaler does, and the optimizer "
                "would step on gradients as much too large; call step.gradients(samples, backward) instead, then "
                "scaler.unscale_(optimizer), clip, scaler.step(optimizer), scaler.update() and optimizer.zero_grad()"
            )

    def find_maximum_batch_size(
        self,
        sample: Sample,
        *,
        upper: int = LARGEST_TRIED,
        in_parts: bool = False,
        settings: AdaptiveBatchingConfig = AdaptiveBatchingConfig(),  # noqa: B008 (immutable)
    ) -> ProbeResult:
        """Find how many samples fit in one forward and backward, by real steps, and restore all state afterwards.

        The number is rounded down to a power of two, unless ``settings`` say otherwise, or ``in_parts`` is True.

        Call it before training: weights, optimizer states, gradients and random numbers are as before.

        Args:
            sample: The sample that takes most memory, such as the longest.
            upper: Largest size to try, such as the number of samples in the data.
            in_parts: True to find the size of a part, which runs while the gradients of others are held. Multiply it by
                the length of ``sample`` for :attr:`max_tokens`.
            settings: Provides ``memory_limit``, ``headroom``, ``search`` and ``round_to_power_of_two``.

        Returns:
            The size, which has run, as ``batch_size``; with every measurement.

        Raises:
            ConfigError: If ``upper`` is below 1, if the limits leave nothing beyond what is in use, or if there is no
                room to save weights and optimizer states.
            DoesNotFitError: If one sample does not fit.
            NotImplementedError: If the peak of a step cannot be measured on the model's device.
        """

        device, ranks = device_of(self._model), self._parallel.ranks
        self._parallel.check_size()
        end_forward(self._parallel.roots)
        with self._parallel.without_sync():  # of shards a backward runs as well, for which one has to be enough
            self._look_at_communication([sample] * (1 if self._parallel.roots else 2))

        def of_batch(batch: Any) -> None:
            total, number = run_forward(self._loss, self._model, batch)
            (total / number).backward()  # type: ignore[no-untyped-call]

        def run(batch: Any) -> None:
            end_forward(self._parallel.roots)
            self._runner.run_once([partial(of_batch, batch)] * (2 if in_parts else 1)).raise_if_failed()
            self._parallel.sum_gradients()
            clip_and_step(self._model, [self._optimizer], self._max_grad_norm)

        step = TrainingStep(
            self._model, [self._optimizer], lambda size: collated([sample] * size, self._collate), run,
            state=self._work.state,
        )  # fmt: skip
        rounds = settings.round_to_power_of_two and not in_parts  # the size of a part is none of a batch
        request = ProbeRequest(int(ranks.smallest(upper)), rounds=rounds, in_parts=in_parts)
        result = find_largest(step, settings, memory_meter(device), request, ranks=ranks)
        self._work.limit.note(result.batch_size * self._work.tokens([sample]))
        return result

    def _checked_on_all(self, samples: Sequence[Sample]) -> tuple[list[Sample], int, list[Sample]]:
        """Return the samples of this rank, the number on all ranks, and one that may fill up, if there is any."""
        ranks, work = self._parallel.ranks, self._work
        if ranks.size == 1:
            checked = self._checked(samples)
            return checked, len(checked), checked[:1]
        checked = []
        shortest: list[Sample] = []

        def check() -> tuple[int, bool]:
            checked.extend(self._checked(samples))
            shortest.extend([min(checked, key=lambda sample: work.tokens([sample]))] if checked else [])
            return len(checked), work.balances_ranks

        counts, balances = zip(*ranks.all_results(check), strict=True)
        if len(set(balances)) > 1:
            raise ConfigError(
                f"samples are balanced over ranks on rank {balances.index(True)} and not on rank "
                f"{balances.index(False)}; give balance_ranks, and length or none, alike on all ranks"
            )
        if any(counts) and not all(counts):
            of_ranks, failure = gathered(ranks, shortest)
            if failure:
                raise ConfigError(
                    f"a rank without samples runs one of another's, and they cannot be sent ({failure}); give each "
                    "rank a sample, or samples that can be pickled"
                )
            shortest = next(own for own in of_ranks if own)
        return checked, sum(counts), shortest

    def _look_at_communication(self, samples: list[Sample]) -> None:
        """Learn what shards communicate in a forward and backward; of copies, check that they do not. Looks once.

        ``samples`` are two where that can be, because batch norm cannot train on one.

        Raises:
            ConfigError: If a forward of copies communicates, because ranks do not run their parts in step.
        """
        parallel, device = self._parallel, device_of(self._model)
        if not parallel.is_recorded:
            batches = list[Any]()  # which all ranks have to have

            def forward_backward() -> None:
                run_forward(self._loss, self._model, batches[0])[0].backward()  # type: ignore[no-untyped-call]

            with rehearsal(self._work.state, device, self._work.parameters()):
                parallel.ranks.all_results(lambda: batches.append(collated(samples, self._collate)))
                parallel.record(forward_backward, device)
        if self._knows_forwards_are_local or parallel.roots or parallel.ranks.size == 1:
            return

        def issued() -> int:
            with rehearsal(self._work.state, device), torch.no_grad():
                before = num_collectives(device)
                run_forward(self._loss, self._model, collated(samples, self._collate))
                return num_collectives(device) - before

        if most := max(parallel.ranks.all_results(issued)):
            raise ConfigError(
                f"loss communicates with other ranks in each forward pass (collectives: {most}), and ranks do not run "
                "their parts of a batch in step; leave out of the loss what gathers or sums over ranks"
            )
        self._knows_forwards_are_local = True

    def _checked(self, samples: Sequence[Sample]) -> list[Sample]:
        if isinstance(samples, Mapping):
            raise ConfigError(
                f"samples is a {type(samples).__name__}, which looks collated already; pass a list of samples, as a "
                "DataLoader with collate_fn=list yields"
            )
        samples = list(samples)
        if any(parameter.grad is not None for parameter in self._work.parameters()):  # which the optimizer has
            raise ConfigError(
                "gradients are left over from before this step and would be lost if it ran out of memory; call "
                "optimizer.zero_grad() first, and pass all samples of an optimizer step at once"
            )
        return samples


def clip_and_step(model: nn.Module, optimizers: Sequence[Optimizer], max_grad_norm: float | None) -> None:
    """Clip the gradients of all parameters, step the optimizers, and leave no gradients behind."""
    parameters = parameters_of(model, optimizers)
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
    for parameter in parameters:  # those that no optimizer has, too
        parameter.grad = None
    torch.clear_autocast_cache()  # copies of the weights before the step, where the caller's context is still open
