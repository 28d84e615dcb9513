"""The plan of a run: what its config takes of each device, and what the run would make of it, without a GPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DistributedSampler

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._growth.course import PlannedEpoch
from adaptive_batching._micro_batches.cut import Capacity, cut_by_length
from adaptive_batching._plan import Forecast, Need, outside_of_allocator
from adaptive_batching._probe.sizes import candidate_sizes
from adaptive_batching._torchtune.cutting import FIRST_FORWARD_COST, Execution
from adaptive_batching._torchtune.growing import Growth, accumulation_of, make_controller, resolve_increase
from adaptive_batching._torchtune.host import Host, StockRun
from adaptive_batching._torchtune.images import COLLATE
from adaptive_batching._torchtune.on_paper import Data, on_devices, quiet, set_up
from adaptive_batching._torchtune.probing import Probed, accumulates, settled, upper_bound
from adaptive_batching._torchtune.set_up_memory import Allocations
from adaptive_batching._torchtune.settings import read_settings
from adaptive_batching._torchtune.training_step import training_step
from adaptive_batching._torchtune.varying import DataAtHand, Shape, TracedLengths, Varying, replay_shapes
from adaptive_batching._trace.bits_and_bytes import paged_bytes
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._trace.traced_step import TraceError
from adaptive_batching._values import ByLength, ConfigError, Fixed, Whole

_SOME_SAMPLES = 2**20  # where the number is not known, so many that data bound nothing
_FORWARDS = 48  # of varying lengths that are replayed, and those that complete an optimizer step
_SHORTEST = 16  # tokens; below, a step may take other kernels


class NotPlannedError(RuntimeError):
    """Raised for what no plan can be made of; the message says why."""


class TooLongError(ConfigError):
    """Raised for samples that are longer than a model takes."""


@dataclass(frozen=True)
class Question:
    """A run to plan."""

    recipe: str
    cfg: DictConfig
    devices: int = 1
    samples: int | None = None  # of the data; None if that is not known
    memory_bytes: int | None = None  # of a device; None if that is not known

    def changed(self, **keys: object) -> Question:
        """Return the question with other keys in the config; dots in their names are written as two underscores."""
        cfg = copy.deepcopy(self.cfg)
        for key, value in keys.items():
            OmegaConf.update(cfg, key.replace("__", "."), value, merge=False)
        return replace(self, cfg=cfg)


@dataclass(frozen=True)
class Sketch:
    """A run on paper, traced at one length."""

    question: Question
    length: int
    forecast: Forecast
    asked: int  # samples of a forward that the config asks for at least
    accumulation: int
    paged_bytes: int  # optimizer states that lie in managed memory, beside all others
    trained_parameters: int
    parameters: int
    frozen_parameters: int  # of the reference model or the teacher, if there is one
    assumes: str | None
    has_images: bool  # so that tokens of samples say little of their memory

    @cached_property
    def largest(self) -> int | None:
        """Samples of the largest forward that fits; None if the memory is not known."""
        memory = self.question.memory_bytes
        return None if memory is None else self.forecast.largest(memory)


def sketch(question: Question, length: int, *, whole: bool = True) -> Sketch:
    """Set a run up on paper and trace its step on samples of ``length`` tokens.

    Where gradients add up, two forwards are traced if ``whole``, else the last one alone. Samples longer than the model
    takes are a :class:`TooLongError`; whatever stock raises about the config comes through.
    """
    allocations = Allocations()
    with _set_up(question, length, allocations) as (host, run, settings):
        set_up = allocations.so_far(empties_cache=question.devices > 1 or settings.probes)
        models = [host.model, *host.objective.frozen_models]
        most = min(int(getattr(model, "max_seq_len", length)) for model in models)
        if length > most:
            raise TooLongError(f"samples have {length} tokens, and the model takes {most}; set tokenizer.max_seq_len")
        in_parts = accumulates(host, run, settings, measures_noise=False)
        step = replace(
            training_step(host, host.loader.dataset[0], accumulates=in_parts, traces_both=whole), on_cuda=True
        )
        traced = trace_step(step)
        sizes = [(p.numel(), p.requires_grad) for p in host.model.parameters()]
        data: Data = host.loader.dataset
        forwards = 2 if whole and in_parts else 1
        return Sketch(
            question, length, Forecast(traced, outside_of_allocator(question.devices), set_up, forwards),
            _asked(run, settings), run.accumulation, sum(map(paged_bytes, host.optimizers)),
            sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes),
            sum(p.numel() for model in models[1:] for p in model.parameters()),
            data.assumes, data.image is not None,
        )  # fmt: skip


@dataclass(frozen=True)
class Outlook:
    """What a run makes of the largest forward that fits."""

    maximum: int  # largest batch size, as the run would take it
    reason: str  # the bound that gives it
    epochs: Sequence[PlannedEpoch]
    decided: bool  # False if the batch grows by what training shows


def look_out(question: Question, length: int, largest: int) -> Outlook:
    """Return the epochs of a run, planned as it plans them itself, if ``largest`` samples of ``length`` tokens fit."""
    with _set_up(question, length) as (host, run, settings):
        increase = resolve_increase(settings)
        upper, reason = upper_bound(host, run, settings)
        probed = Probed(upper, reason, settings.micro_batch_size)
        if settings.probes:
            rounds = settings.round_to_power_of_two and not settings.fills_memory
            sizes = candidate_sizes(upper, powers_of_two=rounds, include=run.batch_size if settings.grows else None)
            fitting = [size for size in sizes if size <= largest]
            found = fitting[-1] if fitting else 1
            by = reason if found == sizes[-1] else "memory"
            probed = settled(settings, Probed(found, by, settings.micro_batch_size), upper, reason)
        accumulation = accumulation_of(settings, run)
        controller = make_controller(host, run, increase, accumulation, probed, {})
        decides_early = controller.decides_early and increase.noise_scale_every is None
        execution = Execution(is_stock=not settings.enabled)
        growth = Growth(host, run, increase, controller, execution, {})
        return Outlook(probed.maximum, probed.reason, growth.course.plan(0), decides_early)


@dataclass(frozen=True)
class Plan:
    """All that is known of a run before it starts."""

    made: Sketch
    need: Need  # of the forward that the config asks for
    data: DataAtHand | None
    outlook: Outlook | None  # None if nothing fits, or if the memory or the number of samples is not known
    varying: Varying | str | None  # what samples take as they come, or why that is not known; None if all are alike

    @cached_property
    def epoch_flops(self) -> float | None:
        """Model FLOPs of an epoch on all devices, without padding; None if its samples are not known.

        Attention grows with the square of a sample's length, all else with the length.
        """
        need, samples, length = self.need, self.made.question.samples, self.made.length
        attention = need.attention_flops / need.batch_size
        others = (need.flops - need.recomputed_flops) / need.batch_size - attention
        if self.data is None:
            return None if samples is None else samples * (others + attention)
        shares = [min(each, length) / length for each in self.data.lengths]
        return sum(share * others + share * share * attention for share in shares)


def make_plan(question: Question, length: int, data: DataAtHand | None) -> Plan:
    made = sketch(question, length)
    need = made.forecast.need(made.asked)
    outlook = look_out(question, length, made.largest) if question.samples is not None and made.largest else None
    varying: Varying | str | None = None
    if data is not None and outlook is not None:
        try:
            varying = as_they_come(made, data, outlook)
        except TraceError as error:
            varying = str(error)
    return Plan(made, need, data, outlook, varying)


def as_they_come(made: Sketch, data: DataAtHand, outlook: Outlook) -> Varying | None:
    """Replay the first steps of an epoch with the lengths that its samples have; None if all forwards have one shape.

    ``made`` is traced at the longest length. It is a :class:`TraceError` if the order of allocations depends on the
    length.
    """
    question, length = made.question, made.length
    assert made.largest and question.memory_bytes is not None
    cuts_by_length = isinstance(read_settings(question.cfg, warns=False).micro_batch_size, ByLength)
    if not cuts_by_length or data.packed or made.has_images or length < 2 * _SHORTEST:
        return None
    shuffles = bool(question.cfg.get("shuffle", True))
    order = DistributedSampler[int](data.lengths, question.devices, rank=0, shuffle=shuffles)  # type: ignore[arg-type]
    lengths = [min(data.lengths[index], length) for index in order]
    capacity = Capacity(((length, made.largest),))
    cost, window = min(FIRST_FORWARD_COST, capacity.tokens), outlook.epochs[0].batch_sizes[0] * made.accumulation
    steps: list[list[Shape]] = []
    for start in range(0, len(lengths) - window + 1, window):
        here = lengths[start : start + window]
        cut = cut_by_length(here, capacity, cost)
        steps.append([(len(part), max(max(here[index] for index in part), _SHORTEST)) for part in cut])
        if sum(map(len, steps)) >= _FORWARDS:
            break
    if not steps:
        return None
    shorter = length // 2 // _SHORTEST * _SHORTEST
    one, other = ((tokens, sketch(question, tokens, whole=False).forecast.step) for tokens in (length, shorter))
    return replay_shapes(TracedLengths(one, other), steps, question.memory_bytes - made.forecast.most_outside)


def _check_covered(question: Question) -> None:
    """Refuse what would be planned wrongly, or ends in the first step."""
    cfg = question.cfg
    collate = str(cfg.get("collate_fn", ""))
    if "image" in collate and collate != COLLATE:
        raise NotPlannedError(f"collate_fn={collate} makes batches of images that are not known; {COLLATE} is")
    tensor_parallel = cfg.get("tensor_parallel_dim", 1)
    if tensor_parallel == 1 or not question.recipe.startswith("full_finetune"):
        return
    ends = f"with tensor_parallel_dim={tensor_parallel} training would end in its first step"
    if cfg.get("clip_grad_norm") is not None:
        raise NotPlannedError(f"{ends}: torch takes no norm of gradients on several meshes; set clip_grad_norm=null")
    of_torch = str(cfg.optimizer["_component_"]).startswith("torch.optim.")
    if tensor_parallel == question.devices and of_torch and cfg.optimizer.get("foreach") is not False:
        raise NotPlannedError(
            f"{ends}: on as many devices, norms are no distributed tensors, and torch's foreach optimizers take no "
            f"mixture; set optimizer.foreach=False, or train on more devices"
        )


@contextlib.contextmanager
def _set_up(
    question: Question, length: int, allocations: Allocations | None = None
) -> Iterator[tuple[Host, StockRun, AdaptiveBatchingConfig]]:
    _check_covered(question)
    dataset = question.cfg.get("dataset")
    packed = isinstance(dataset, DictConfig) and bool(dataset.get("packed", False))
    data = Data(length, question.samples or _SOME_SAMPLES, packed)
    with quiet(), on_devices(question.devices):
        settings = read_settings(question.cfg, warns=False)
        host, run = set_up(question.recipe, question.changed(device="cuda").cfg, data, question.devices, allocations)
        yield host, run, settings


def _asked(run: StockRun, settings: AdaptiveBatchingConfig) -> int:
    """Return the least forward that the settings leave to a run: 1 where it takes what fits."""
    if isinstance(settings.micro_batch_size, Fixed):
        return settings.micro_batch_size.samples
    takes_what_fits = settings.use_maximum_batch_size and not settings.grows
    return run.batch_size if isinstance(settings.micro_batch_size, Whole) and not takes_what_fits else 1
