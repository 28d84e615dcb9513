"""Checks before training: what cannot be trained this way is refused in one line that says what works."""

from __future__ import annotations

import inspect
import logging
from typing import Any, NoReturn

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from adaptive_batching._ranks.fsdp import why_not_drained
from adaptive_batching._transformers import one_loop
from adaptive_batching._transformers.handed_out import handing_out_samples
from adaptive_batching._transformers.older_versions import check_rotary, check_version
from adaptive_batching._values import ConfigError

log = logging.getLogger(__name__)

_STEPS_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
_GENERATING = {
    "AsyncDistillationTrainer", "AsyncGRPOTrainer", "NashMDTrainer", "OnlineDPOTrainer", "PPOTrainer", "XPOTrainer",
}  # fmt: skip
# These compare samples with each other, which does not show where a policy is like its reference, as it begins.
_OVER_BATCH = ("aot", "aot_pair", "aot_unpaired")
_LOOP = {
    "_run_epoch": {"get_batch_samples", "training_step"},
    "_inner_training_loop": one_loop.CALLED
    if one_loop.IS_IN_USE
    else {"set_initial_training_values", "_prepare_for_training", "_init_training_state", "_run_epoch"},
}
"""Methods of ``Trainer`` that run a step, and what they call that we put ours in place of."""

_WORKS = "train on one device, or on several with DDP (torchrun) or FSDP2 (fsdp=True)"


def check_class(trainer_class: type[Trainer], args: Any) -> None:
    """Raise ConfigError if the loss or loop of a class of trainers is known to be of a batch as a whole.

    It needs no trainer, which may load several models and tokenize its data before it is there.

    Args:
        trainer_class: The class.
        args: What its trainer is given, as ``TrainingArguments``; None if that is not known yet.
    """
    check_version()
    names = {class_.__name__ for class_ in trainer_class.__mro__}
    if names & _GENERATING or not _calls(trainer_class, "_prepare_inputs", {"_prepare_inputs"}):
        _refuse_generating(trainer_class.__name__, "")
    if args is not None:
        _check_loss(trainer_class.__name__, names, args)
    for method, called in _LOOP.items():
        if not _calls(trainer_class, method, called):
            raise ConfigError(
                f"{trainer_class.__name__} has a {method} of its own, which does not call {', '.join(sorted(called))}, "
                f"by which steps are run in parts; call super().{method}(...), or train without adaptive"
            )


def _calls(trainer_class: type[Trainer], method: str, called: set[str]) -> bool:
    """Return True if each function that stands in for a method of ``Trainer`` passes the call on, or does as it does.

    That is to name what it overrides, or all that is ``called`` in ``Trainer`` itself, where some libraries put a
    function of theirs.
    """
    for class_ in trainer_class.__mro__:
        function = inspect.unwrap(vars(class_).get(method, _nothing))
        known = function is _nothing or class_.__module__.partition(".")[0] == "adaptive_batching"
        if known or function.__module__.partition(".")[0] == "transformers":
            continue
        names = set(getattr(getattr(function, "__code__", None), "co_names", ()))
        if method not in names and not called <= names:
            return False
    return True


def _nothing() -> None: ...


def check_batch_samples(trainer: Any, batches: list[Any]) -> None:
    """Raise ConfigError if a trainer's own ``get_batch_samples`` gives other batches, or another number of targets.

    Ours takes its place, so it may only do what that does.

    Args:
        trainer: Before training.
        batches: Some, as the collate function makes them.
    """
    owners = [class_ for class_ in type(trainer).__mro__ if "get_batch_samples" in vars(class_)]
    owner = next(class_ for class_ in owners if class_.__module__.partition(".")[0] != "adaptive_batching")
    function, device = vars(owner)["get_batch_samples"], trainer.args.device
    if function.__module__.partition(".")[0] == "transformers":
        return
    expected = trainer._get_num_items_in_batch(batches, device)
    given, number = function(trainer, iter(batches), len(batches), device)
    same = [*map(id, given)] == [*map(id, batches)] and (number is None) == (expected is None)
    if not same or (expected is not None and float(number) != float(expected)):
        raise ConfigError(
            f"{type(trainer).__name__} has a get_batch_samples of its own, which gives other batches or another number "
            f"({number}) than that of Trainer ({expected}), and steps in parts need that of Trainer; what a loss is "
            "divided by can be set in compute_loss or compute_loss_func"
        )


def check_parallelism(trainer: Any) -> None:
    """Raise ConfigError if the devices or the optimizer of a trainer leave no room for steps in parts."""
    args = trainer.args
    optimizer = str(getattr(args.optim, "value", args.optim))
    parallel = {"tensor": "get_tp_size", "context": "get_cp_size", "sequence": "get_sp_size"}
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True starts again with fewer samples; set it to False, and micro_batch_size='auto' "
            "or use_maximum_batch_size=True"
        )
    if trainer.is_deepspeed_enabled:
        raise ConfigError(f"DeepSpeed shards a model its own way; {_WORKS}")
    if args.device.type == "xla" or trainer.is_fsdp_xla_enabled:
        raise ConfigError(f"a TPU compiles a step as a whole, which cannot run again in parts; {_WORKS}, on GPUs")
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ConfigError(
            "a model that from_pretrained has sharded is not Accelerate's; load it whole, and set fsdp=True"
        )
    for kind, size in parallel.items():
        if getattr(trainer, size, lambda: 1)() > 1:
            raise ConfigError(f"{kind} parallelism has collectives within each layer; {_WORKS}")
    if args.n_gpu > 1:
        raise ConfigError(f"one process has {args.n_gpu} devices, which DataParallel uses; {_WORKS}")
    if any(name in optimizer for name in _STEPS_IN_BACKWARD):
        raise ConfigError(f"optim={optimizer!r} updates weights in the backward pass of each part; take another")
    _check_placement(trainer.model)


def check_trainer(trainer: Any) -> None:
    """Raise ConfigError if a trainer cannot run its steps in parts."""
    check_parallelism(trainer)
    args = trainer.args
    if trainer.is_fsdp_enabled:
        _check_fsdp(trainer)
    config = getattr(trainer.model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise ConfigError(
            "output_router_logits=True adds a router's auxiliary (load-balancing) loss, which uses statistics of the "
            "whole batch; set it to False in the model's config, or train without adaptive"
        )
    check_rotary(trainer.model)
    check_class(type(trainer), args)
    _check_two_means(trainer)


def _check_placement(model: Any) -> None:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if getattr(model, "is_parallelizable", False) and getattr(model, "model_parallel", False):
        places |= {str(parameter.device) for parameter in model.parameters()}
    if len(places) > 1:
        places = {f"GPU {place}" if place.isdigit() else place for place in places}
        raise ConfigError(
            f"device_map has put layers of the model on {' and '.join(sorted(places))}, of which a probe measures one; "
            f"load it with device_map={{'': 0}}, or train on several devices with DDP (torchrun) or FSDP2 (fsdp=True)"
        )


def _check_loss(name: str, names: set[str], args: Any) -> None:
    """Raise ConfigError if TRL's loss with these ``args`` is over a batch; ``names`` has those of bases."""
    if "GKDTrainer" in names and any(getattr(args, key, 0) for key in ("lmbda", "seq_kd")):
        _refuse_generating(
            f"{name} with lmbda={args.lmbda}, seq_kd={args.seq_kd}",
            "set lmbda=0 and seq_kd=False, which trains on the answers of the data, or ",
        )
    given = getattr(args, "loss_type", None) or []
    losses = [given] if isinstance(given, str) else given
    refused, instead = [loss for loss in losses if loss in _OVER_BATCH], "'sigmoid'"
    if "KTOTrainer" in names and "apo_zero_unpaired" not in losses:
        refused, instead = losses, "'apo_zero_unpaired'"
    if "BCOTrainer" in names:
        refused, instead = ["bco"], "'bco_pair' of DPOTrainer"
    if refused:
        raise ConfigError(
            f"loss_type={refused[0]!r} of {name} compares samples of a batch with each other, so its parts do not add "
            f"up to it; take another, such as {instead}, or train without adaptive"
        )


def _check_two_means(trainer: Any) -> None:
    """Raise ConfigError if TRL's loss adds a mean over tokens to one over samples and runs in half precision.

    In single precision that is measured, as for anybody's loss. The rounding of half precision hides it.
    """
    args, names = trainer.args, {class_.__name__ for class_ in type(trainer).__mro__}
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    if not (args.bf16 or args.fp16 or dtypes & {torch.bfloat16, torch.float16}):
        return
    given = getattr(args, "loss_type", None) or []
    if mean := _mean_of_tokens(args, names, [given] if isinstance(given, str) else given):
        what, remedy = mean
        raise ConfigError(
            f"{what} of {type(trainer).__name__} is a mean over all tokens of a batch, beside a mean over its samples, "
            f"so its parts do not add up to it however they are weighted; {remedy}train without adaptive"
        )


def _refuse_generating(name: str, remedy: str) -> NoReturn:
    raise ConfigError(
        f"{name} makes its batches while training, as with generated answers, so that there are none to probe or split "
        f"before; {remedy}train without adaptive"
    )


def _mean_of_tokens(args: Any, names: set[str], losses: list[str]) -> tuple[str, str] | None:
    """Return which term of a loss of TRL's is a mean over tokens, and how to do without; None if there is none."""
    if "DPOTrainer" in names and "sft" in losses:
        return "loss_type='sft'", "leave it out, or "
    if "ORPOTrainer" in names:
        return "the cross entropy", ""
    for trainer, weight in (("CPOTrainer", "cpo_alpha"), ("TPOTrainer", "tpo_alpha")):
        if trainer in names and (value := getattr(args, weight, 0)):
            return f"{weight}={value}", "set it to 0, or "
    return None


def _check_fsdp(trainer: Any) -> None:
    if one_loop.IS_IN_USE:
        raise ConfigError("FSDP2 needs transformers 5.3 or later here; update it, or train with DDP (torchrun)")
    plugin, mesh = trainer.accelerator.state.fsdp_plugin, trainer.accelerator.parallelism_config
    if plugin.fsdp_version != 2:
        raise ConfigError("FSDP1 leaves ranks waiting for one that runs out of memory; set fsdp_config={'version': 2}")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise ConfigError("fsdp_config cpu_offload=True steps the optimizer on the host; set it to False")
    if mesh is not None and mesh.dp_replicate_size > 1:
        raise ConfigError(
            f"parallelism_config dp_replicate_size={mesh.dp_replicate_size} sums gradients in a second collective, for "
            f"which ranks would wait if one ran out of memory; set it to 1"
        )
    if why := why_not_drained():
        raise ConfigError(f"{why}; train with DDP")


def check_data(trainer: Any, *, balances_ranks: bool, grows: bool = False) -> None:
    """Raise ConfigError if the training data cannot be handed out as samples.

    Args:
        trainer: Before training.
        balances_ranks: True if ranks share out the samples of a step.
        grows: True if the batch is to grow from one epoch to the next.
    """
    args, data = trainer.args, trainer.train_dataset
    if isinstance(data, IterableDataset):
        if one_loop.IS_IN_USE:
            raise ConfigError("train_dataset streams, which needs transformers 5.3 or later here; update it")
        dispatches = args.world_size > 1 and args.accelerator_config.dispatch_batches is None
        check_stream(data, grows=grows, dispatches=dispatches)
    elif data is not None:
        name = f"train_dataset is a {type(data).__name__}, which has"
        instead = (
            "give a map-style data set, with __len__ and __getitem__, such as a list or a datasets.Dataset, or a "
            "stream that is a torch.utils.data.IterableDataset"
        )
        if not hasattr(data, "__len__"):
            raise ConfigError(f"{name} no length; {instead}")
        if not hasattr(data, "__getitem__"):
            raise ConfigError(f"{name} a length and no items; {instead}")
        if not len(data):
            raise ConfigError(f"{name} no samples")
    if rebalances(args) and not balances_ranks:
        raise ConfigError(
            "train_sampling_strategy='batch_rebalance' makes batches of its own; set it to 'random', with which "
            "samples are balanced over devices if micro_batch_size='auto' and balance_ranks is on"
        )
    if rebalances(args):
        log.info(
            "train_sampling_strategy='batch_rebalance' is not needed, and trains as 'random': samples are balanced "
            "over devices in each step"
        )
    for key in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, key):
            raise ConfigError(f"accelerator_config.{key}=True cuts batches after they are collated; set it to False")
    if args.world_size > 1 and not args.accelerator_config.even_batches:
        raise ConfigError("accelerator_config.even_batches=False gives ranks unequal numbers of steps; set it to True")


def check_stream(data: Any, *, grows: bool, dispatches: bool) -> None:
    """Raise ConfigError if a stream cannot be trained on.

    Args:
        data: The stream.
        grows: True if the batch is to grow from one epoch to the next.
        dispatches: True if one process reads the stream for others.
    """
    if grows and not has_length(data):
        raise ConfigError(
            f"batch_increase_function is asked at the start of each epoch, and train_dataset is a stream without a "
            f"length ({type(data).__name__}), whose epochs are not known; give it a __len__, the samples of an epoch, "
            "or leave batch_increase_function out"
        )
    if dispatches:
        raise ConfigError(
            "accelerator_config.dispatch_batches=None has the first process read a stream and send collated batches to "
            "the others; set accelerator_config={'dispatch_batches': False}, with which each reads its own part"
        )


def rebalances(args: Any) -> bool:
    """Return True if Trainer's own sampler is asked for that gives devices batches of like cost."""
    return getattr(args, "train_sampling_strategy", None) == "batch_rebalance"


def check_loader(trainer: Any, loader: Any, batch_size: int, *, resizes: bool) -> list[BatchSampler]:
    """Return the batch samplers of a training loader, whose batch size can be set, from the outermost in.

    Args:
        trainer: Has made the loader.
        loader: What its ``get_train_dataloader`` has returned.
        batch_size: Samples of its batches, as configured.
        resizes: True if batches may become larger.

    Raises:
        ConfigError: If the loader is of another kind, or its batches are of another size.
    """
    name = f"get_train_dataloader of {type(trainer).__name__}"
    outermost = getattr(loader, "batch_sampler", None)
    samplers = [outermost, getattr(outermost, "batch_sampler", None)]
    batch_samplers = [sampler for sampler in samplers if isinstance(sampler, BatchSampler)]
    if not batch_samplers:
        raise ConfigError(
            f"{name} returns a {type(loader).__name__} without a batch sampler of torch, and cannot be split; "
            f"return a torch.utils.data.DataLoader with batch_size and data_collator, or leave it to Trainer"
        )
    # A loader of Accelerate's passes for the class that it wraps.
    of_accelerate = type(loader) in (DataLoaderShard, DataLoaderDispatcher)
    if not of_accelerate and type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"{name} returns a {type(loader).__name__}, which changes batches after they are collated; do that in "
            f"data_collator, and return a torch.utils.data.DataLoader"
        )
    if handing_out_samples(loader, trainer.data_collator) is None:
        collate = loader.collate_fn
        raise ConfigError(
            f"{name} collates with {getattr(collate, '__name__', type(collate).__name__)}, and not with data_collator, "
            f"by which samples are collated in parts; give it to the trainer as data_collator, and write "
            f"DataLoader(..., collate_fn=self.data_collator)"
        )
    size = getattr(batch_samplers[-1], "batch_size", batch_size)
    if size not in (batch_size, trainer._train_batch_size):
        raise ConfigError(
            f"{name} makes batches of {size} samples, and per_device_train_batch_size={batch_size}; write "
            f"DataLoader(..., batch_size=self._train_batch_size)"
        )
    if resizes and not isinstance(loader.dataset, IterableDataset) and not _can_be_resized(batch_samplers[-1]):
        raise ConfigError(
            f"{name} uses a {type(batch_samplers[-1]).__name__}, which keeps the sizes of its batches; take torch's "
            f"BatchSampler, or set only micro_batch_size, which splits them"
        )
    return batch_samplers


def _can_be_resized(sampler: Any) -> bool:
    """Return True if a batch sampler makes more batches when their size is smaller."""
    before, counts = sampler.batch_size, []
    for size in (1, 2):
        sampler.batch_size = size
        counts.append(len(sampler))
    sampler.batch_size = before
    return counts[0] > counts[1] or counts[0] <= 1
