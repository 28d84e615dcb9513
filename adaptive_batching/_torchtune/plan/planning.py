"""The plan of a run: what its config takes of each device, what the run would make of it, and what would help.

Plans with other settings, lengths or batch sizes are made in parallel, by processes that are forked from one that has
only imported what they need: where autograd has run with a CUDA build of torch, it refuses to run in a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torchtune
from omegaconf import DictConfig, OmegaConf
from torchtune import _recipe_registry as registry

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._gpus import Gpu
from adaptive_batching._growth.batch_size_schedule import PlannedEpoch
from adaptive_batching._plan import Forecast, MemoryEstimate, outside_of_allocator
from adaptive_batching._probe.sizes import candidate_sizes
from adaptive_batching._probe.sizing import Sizes
from adaptive_batching._step_time.forecast import kind_of
from adaptive_batching._step_time.seconds import StepSeconds, seconds_of_step
from adaptive_batching._torchtune.plan.meta_setup import RECIPES, Allocations, Data, on_devices, quiet, set_up
from adaptive_batching._torchtune.stock.host import Host, StockRun
from adaptive_batching._torchtune.stock.less_memory import of_activations
from adaptive_batching._torchtune.stock.losses import fake_quantized, next_token
from adaptive_batching._torchtune.stock.stand_ins import image_of
from adaptive_batching._torchtune.train.growing import Growth, make_controller, resolve_increase
from adaptive_batching._torchtune.train.probing import sizing_of
from adaptive_batching._torchtune.train.settings import read_settings
from adaptive_batching._torchtune.train.splitting import SplitPolicy
from adaptive_batching._torchtune.train.training_step import training_step
from adaptive_batching._trace.bits_and_bytes import paged_bytes
from adaptive_batching._trace.trace import trace_step
from adaptive_batching._values import ConfigError, first_line

CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"
LENGTHS = (512, 1024, 2048, 4096, 8192)  # tokens of a sample in a table
BATCHES = (1, 2, 4, 8, 16, 32)  # samples of a forward in a table

_SOME_SAMPLES = 2**16  # where the number is not known, more than a batch has; each step of the schedule is computed
_CHUNKED = "torchtune.modules.loss.CEWithChunkedOutputLoss"
_PAGED = "bitsandbytes.optim.PagedAdamW8bit"
_TRAIN_ALL = ("full_finetune_single_device", "full_finetune_distributed", "full_dpo_distributed", "qat_distributed")
_COMPILE_NOTHING = ("lora_dpo_distributed", "qat_distributed", "qat_lora_finetune_distributed")
_CORES = os.cpu_count() or 1
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["adaptive_batching._torchtune.plan.plan_process"])


class NotPlannedError(RuntimeError):
    """Raised for what no plan can be made of; the message says why."""


class TooLongError(ConfigError):
    """Raised for samples that are longer than the model takes."""


@dataclass(frozen=True)
class PlanRequest:
    """A run to plan."""

    recipe: str
    cfg: DictConfig
    devices: int = 1
    samples: int | None = None  # of the data; None if that is not known
    memory_bytes: int | None = None  # of a device; None if that is not known
    tells_time: bool = False  # if it is to be noted what a step asks of the device

    def changed(self, overrides: str) -> PlanRequest:
        """Return the request with ``key=value`` pairs, as they are pasted into a command line, in the config."""
        cfg = OmegaConf.merge(self.cfg, OmegaConf.from_dotlist(overrides.split()))
        assert isinstance(cfg, DictConfig)
        return replace(self, cfg=cfg)


@dataclass(frozen=True)
class TracedPlan:
    """A run on paper, traced at one length."""

    request: PlanRequest
    length: int
    forecast: Forecast
    asked: int  # samples of a forward that the config asks for at least
    paged_bytes: int  # optimizer states that lie in managed memory, on top of all others
    trained_parameters: int
    parameters: int
    frozen_parameters: int  # of the reference model or the teacher, if there is one
    assumes: str | None  # of samples, in words; None if their length says all
    probes: bool = False  # if the largest forward that fits is what is run

    @cached_property
    def need(self) -> MemoryEstimate:
        return self.forecast.need(self.asked)

    @cached_property
    def largest(self) -> int | None:
        """Samples of the largest forward that fits; None if the memory is not known."""
        memory = self.request.memory_bytes
        return None if memory is None else self.forecast.largest(memory)

    def time_on(self, gpu: Gpu) -> ForwardTime | str:
        """Return how long a forward and backward pass take on a GPU, or why that is not known."""
        if self.request.devices > 1:
            return "on several devices"
        if self.request.cfg.get("compile", False):
            return "compiled"
        size = self.forecast.largest(gpu.memory_bytes) if self.probes else self.asked
        work = self.forecast.step.work_at(size) if size else None
        if work is None:
            return "in sizes that fit" if not size else "of kernels that differ from size to size"
        step = seconds_of_step(work, gpu)
        return ForwardTime(size, size * self.length, step, self.forecast.forwards, kind_of(work, step, ranks=1))


@dataclass(frozen=True)
class ForwardTime:
    """How long a forward and backward pass take, with their share of an optimizer step."""

    samples: int
    tokens: int
    step: StepSeconds
    forwards: int  # in the step
    kind: str  # of runs, by which it is known how well such times are

    @property
    def seconds(self) -> float:
        return self.step.seconds / self.forwards

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def sketch(request: PlanRequest, length: int) -> TracedPlan:
    """Set a run up on paper and trace its step on samples of ``length`` tokens: two forwards where gradients add up."""
    allocations = Allocations()
    with _set_up(request, length, allocations) as (host, run, settings):
        asked = sizing_of(host, run, settings)
        set_up = allocations.so_far(empties_cache=request.devices > 1 or asked.probes)
        most = min(int(getattr(model, "max_seq_len", length)) for model in host.models)
        if length > most:
            raise TooLongError(
                f"samples have {length} tokens, but the model takes at most {most}; set tokenizer.max_seq_len"
            )
        data: Data = host.loader.dataset
        in_parts = asked.request.in_parts
        step = replace(training_step(host, data[0], accumulates=in_parts, traces_both=True), on_cuda=True)
        traced = trace_step(step, notes_work=request.tells_time)
        forecast = Forecast(traced, outside_of_allocator(request.devices), set_up, 2 if in_parts else 1)
        sizes = [(p.numel(), p.requires_grad) for p in host.model.parameters()]
        assumes = "both answers of each pair have that length" if data.pairs else None
        return TracedPlan(
            request, length, forecast, asked.least_forward, sum(map(paged_bytes, host.optimizers)),
            sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes),
            sum(p.numel() for model in host.objective.frozen_models for p in model.parameters()), assumes, asked.probes,
        )  # fmt: skip


def look_out(request: PlanRequest, length: int, largest: int) -> tuple[Sizes, list[PlannedEpoch], bool]:
    """Return a run's largest batch if ``largest`` samples fit, its epochs, and whether training cannot change them."""
    with _set_up(request, length) as (host, run, settings):
        increase = resolve_increase(settings)
        asked = sizing_of(host, run, settings)
        probe, sizes = asked.request, asked.unprobed
        if asked.probes:
            candidates = candidate_sizes(probe.upper, powers_of_two=probe.rounds, include=probe.include)
            largest_size = max((size for size in candidates if size <= largest), default=1)
            sizes = asked.settle(largest_size, probe.upper_reason if largest_size == candidates[-1] else "memory")
        controller = make_controller(host, run, increase, asked.accumulation, sizes, {})
        is_decided = controller.decides_early and increase.noise_scale_every is None
        split_policy = SplitPolicy(is_stock=not settings.enabled)
        growth = Growth(host, run, replace(increase, noise_scale_every=None), controller, split_policy, {})
        return sizes, growth.batch_schedule.plan(0), is_decided


@contextlib.contextmanager
def _set_up(
    request: PlanRequest, length: int, allocations: Allocations | None = None
) -> Iterator[tuple[Host, StockRun, AdaptiveBatchingConfig]]:
    _check_covered(request)
    dataset = request.cfg.get("dataset")
    packed = isinstance(dataset, DictConfig) and bool(dataset.get("packed", False))
    data = Data(length, request.samples or _SOME_SAMPLES, packed)
    with quiet(), on_devices(request.devices):
        settings = read_settings(request.cfg, warns=False)
        cfg = request.changed("device=cuda").cfg
        host, run = set_up(request.recipe, cfg, data, request.devices, allocations)
        if any(image_of(model) is not None for model in host.models):
            raise NotPlannedError("the model takes images, which plan does not count; a dry run does")
        yield host, run, settings


def _check_covered(request: PlanRequest) -> None:
    """Refuse what would be planned wrongly, or ends in the first step."""
    cfg = request.cfg
    tensor_parallel = cfg.get("tensor_parallel_dim", 1)
    if tensor_parallel == 1 or not request.recipe.startswith("full_finetune"):
        return
    ends = f"with tensor_parallel_dim={tensor_parallel} training would end in its first step"
    if cfg.get("clip_grad_norm") is not None:
        raise NotPlannedError(
            f"{ends}: torch cannot compute a gradient norm over several meshes; set clip_grad_norm=null"
        )
    of_torch = str(cfg.optimizer["_component_"]).startswith("torch.optim.")
    if tensor_parallel == request.devices and of_torch and cfg.optimizer.get("foreach") is not False:
        raise NotPlannedError(
            f"{ends}: on this many devices, norms are not distributed tensors, and torch's foreach optimizers cannot "
            "mix the two; set optimizer.foreach=False, or train on more devices"
        )


def levers(request: PlanRequest, length: int) -> Iterator[tuple[str, str, PlanRequest, int]]:
    """Yield what would save memory: a name, what to add to the command line, and the run and the length it makes."""
    recipe, model = request.recipe, request.cfg.model
    for name, paste in _of_config(request):
        yield name, paste, request.changed(paste), length
    is_quantized = "qlora" in str(model["_component_"]) or bool(model.get("quantize_base", False))
    kinds = ["LoRA"] if recipe in _TRAIN_ALL else []
    kinds += [] if is_quantized or "qat" in recipe else ["QLoRA"]
    for name in kinds:
        yield from ((name, *lever, length) for lever in _with_adapters(request, f"{name.lower()}_"))
    if length >= 256:
        yield "shorter samples", f"tokenizer.max_seq_len={length // 2}", request, length // 2
    if not recipe.endswith("single_device"):
        more = replace(request, devices=request.devices * 2)
        yield "more devices", f"--nproc_per_node {more.devices}", more, length


def _of_config(request: PlanRequest) -> Iterator[tuple[str, str]]:
    cfg, recipe = request.cfg, request.recipe
    yield from of_activations(
        checkpoints=bool(cfg.get("enable_activation_checkpointing")),
        offloads=bool(cfg.get("enable_activation_offloading", False)),
        can_offload=not recipe.startswith("knowledge"),
    )
    if not cfg.get("compile", False) and recipe not in _COMPILE_NOTHING:
        yield "compile", "compile=True"
    if cfg.loss["_component_"] != _CHUNKED and RECIPES[recipe] in (next_token, fake_quantized):
        yield "chunked loss", f"loss._component_={_CHUNKED}"
    if recipe in _TRAIN_ALL and recipe != "full_dpo_distributed" and not cfg.get("optimizer_in_bwd", False):
        paste = "optimizer_in_bwd=True"
        paste += "" if cfg.get("clip_grad_norm") is None else " clip_grad_norm=null"
        paste += "" if cfg.get("gradient_accumulation_steps", 1) == 1 else " gradient_accumulation_steps=1"
        yield "optimizer in the backward pass", paste
    optimizer = str(cfg.optimizer["_component_"])
    if not optimizer.startswith("torch.optim."):
        return
    if any(kind in optimizer for kind in ("Adam", "SGD", "Adagrad")) and not cfg.optimizer.get("fused", False):
        paste = "optimizer.fused=True"
        yield "fused optimizer", paste + (" optimizer.foreach=null" if cfg.optimizer.get("foreach") else "")
    # FSDP's sharded parameters are not for bitsandbytes
    if "Adam" in optimizer and recipe == "full_finetune_single_device":
        yield "8-bit optimizer", f"optimizer._component_={_PAGED}"


def _with_adapters(request: PlanRequest, kind: str) -> Iterator[tuple[str, PlanRequest]]:
    """Yield what to paste for the adapters that a stock config gives the same model, and the run; none if none does."""
    builder = str(request.cfg.model["_component_"]).rpartition(".")
    wanted = f"{builder[0]}.{kind}{builder[2].removeprefix('lora_').removeprefix('qlora_')}"
    recipe = request.recipe.replace("full_", "lora_", 1).replace("qat_distributed", "qat_lora_finetune_distributed")
    knows_no_quantized = recipe == request.recipe and recipe.startswith(("lora_dpo", "knowledge"))
    listed = "lora_finetune_single_device" if knows_no_quantized else recipe  # any recipe with adapters takes a model
    for config in [config for stock in registry.get_all_recipes() if stock.name == listed for config in stock.configs]:
        if Path(config.file_path).is_absolute():  # one of ours
            continue
        other = OmegaConf.load(CONFIGS / config.file_path)
        assert isinstance(other, DictConfig)
        if other.model["_component_"] != wanted or other.model.get("use_dora", False):
            continue
        if recipe == request.recipe:  # from LoRA to QLoRA
            paste = f"model._component_={wanted}"
            yield paste, request.changed(paste)
        else:
            size = f"batch_size={request.cfg.batch_size}"
            paste = f"adaptive-batching run {recipe} --config {config.name} {size}"
            yield paste, replace(request, recipe=recipe, cfg=other).changed(size)
        return


def start_processes() -> None:
    """Start the process that others are forked from. What it imports takes seconds, in which this one can go on."""
    if _CORES > 1:
        forkserver.ensure_running()


def pull_levers(traced: TracedPlan) -> list[dict[str, Any]]:
    """Return what each lever saves and the largest batch with it, best first."""
    pulled = _in_parallel(_pulled, [(*lever, traced.need) for lever in levers(traced.request, traced.length)])
    return sorted(pulled, key=lambda lever: -(lever["saved_bytes"] if lever["saved_bytes"] is not None else -(2**62)))


def _pulled(task: tuple[str, str, PlanRequest, int, MemoryEstimate]) -> dict[str, Any]:
    name, paste, request, length, before = task
    row: dict[str, Any] = {"name": name, "paste": paste, "saved_bytes": None, "reserved_bytes": None,
                             "largest_micro_batch": None, "sequence_length": length, "reason": None}  # fmt: skip
    try:
        traced = sketch(request, length)
        row["reserved_bytes"] = traced.forecast.need(before.batch_size).reserved.by_default
        row["saved_bytes"] = before.reserved.by_default - row["reserved_bytes"]
        row["largest_micro_batch"] = traced.largest
    except Exception as error:  # whatever stock refuses or a trace cannot follow
        row["reason"] = first_line(error)[:200]
    return row


def over_lengths(request: PlanRequest, longest: int | None = None) -> list[dict[str, Any]]:
    """Return what forwards need at each length that the model takes, up to ``longest`` tokens if that is known."""
    lengths = LENGTHS if longest is None else (*(length for length in LENGTHS if length < longest), longest)
    rows = _in_parallel(_at_length, [(request, length) for length in lengths])
    return [row for row in rows if row is not None]


def _at_length(task: tuple[PlanRequest, int]) -> dict[str, Any] | None:
    try:
        traced = sketch(*task)
    except TooLongError:
        return None
    return {
        "sequence_length": traced.length,
        "batch_size": traced.asked,
        "needed_bytes": traced.forecast.most_bytes(traced.asked),
        "needed_by_batch": {str(batch): traced.forecast.most_bytes(batch) for batch in BATCHES},
        "largest_micro_batch": traced.largest,
    }


def _in_parallel(function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
    workers = min(_CORES, len(tasks), 4)  # each takes some hundred MiB
    if workers < 2:
        return [function(task) for task in tasks]
    with ProcessPoolExecutor(workers, mp_context=_PROCESSES) as pool:
        return list(pool.map(function, tasks))
