"""The probe of a recipe, whose result is reused as long as nothing that memory depends on has changed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.meter import MemoryMeter, memory_meter
from adaptive_batching._probe.does_not_fit import memory_budget, require_room
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.sizes import ProbeResult
from adaptive_batching._probe.sizing import ProbeRequest, Sizes, Sizing, size_up
from adaptive_batching._probe.stored_probe import (
    Conditions,
    StoredProbe,
    described,
    described_devices,
    plain,
    read_stored,
    settings_of_memory,
    store_probe,
    taken_again,
    versions_of,
)
from adaptive_batching._report.record import Report
from adaptive_batching._step.forward_times import ForwardTimes
from adaptive_batching._step.row_size import first_row
from adaptive_batching._torchtune.stock.data import Sample, is_packed
from adaptive_batching._torchtune.stock.host import Host, StockRun
from adaptive_batching._torchtune.stock.less_memory import remedy
from adaptive_batching._torchtune.stock.objective import worst_case_sample
from adaptive_batching._torchtune.train.training_step import training_step
from adaptive_batching._values import ConfigError, MemoryAmount, masked, memory_size

log = logging.getLogger(__name__)

# Bytes of host memory that a recipe takes on top of its steps: samples, the record, the progress bar, metrics.
_ADDED_BY_TRAINING = 16 * 2**20
_TO_READ = 32  # samples by which the mean length is estimated
_VERSIONS = ("torchtune", "torchao", "bitsandbytes")
# Keys of a config that the memory of a training step cannot depend on. Any other that changes calls for another probe,
# known here or not: a probe too many costs a minute, a stored result that is wrong costs the run.
_NOT_OF_MEMORY = frozenset(
    {
        "output_dir", "checkpointer", "value_checkpointer", "resume_from_checkpoint", "save_adapter_weights_only",
        "save_every_n_steps", "seed", "shuffle", "epochs", "max_steps_per_epoch", "lr_scheduler", "metric_logger",
        "log_every_n_steps", "log_level", "log_peak_memory_stats", "dataset_val", "batch_size_val",
        "run_val_every_n_steps",
        # What of these matters has entries of its own.
        "batch_size", "use_maximum_batch_size", "batch_increase_function", "micro_batch_size", "adaptive_batching",
    }
)  # fmt: skip


@dataclass(frozen=True)
class CacheInputs:
    """Facts of a run, besides its model and data, that the memory of a step depends on."""

    cfg: DictConfig
    resumes: bool = False  # a run goes on: what it has trained with stays while it fits
    stored: StoredProbe | None = None  # by the run that is resumed

    def config(self) -> dict[str, Any]:
        """Return the entries of the config that call for another probe when they change."""
        cfg = OmegaConf.merge(self.cfg, {"output_dir": ""})  # others are interpolated from it
        values: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
        of_memory = {name: value for name, value in values.items() if name not in _NOT_OF_MEMORY}
        # The learning rate is what is tuned most often.
        of_memory["optimizer"] = {key: value for key, value in of_memory["optimizer"].items() if key != "lr"}
        return masked(of_memory)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Probed:
    """The sizes of a run, and what is known of the memory of a forward."""

    sizes: Sizes
    sample_tokens: int = 0  # of a sample of the probe
    stored: StoredProbe | None = None  # by the probe, if one was needed

    @property
    def capacity(self) -> int | None:
        """Padded tokens that fit in a forward, where that bounds micro-batches."""
        return None if self.sizes.fits is None else self.sizes.fits * self.sample_tokens

    @property
    def tokens(self) -> int:
        """Padded tokens of the largest forward that the probe has seen to fit."""
        return 0 if self.stored is None else self.stored.result.batch_size * self.sample_tokens


@dataclass(frozen=True)
class Probe:
    """Asks the training step of a run for the largest batch of copies of ``sample``."""

    host: Host
    run: StockRun
    sizing: Sizing
    cache_inputs: CacheInputs
    sample: Sample  # as long as training can meet
    folder: Path  # of the run, where the result is kept

    @property
    def _length(self) -> int:
        return len(self.host.objective.tokens(self.sample))

    def find(self) -> StoredProbe:
        """Run the probe, or take the result that an earlier run has stored."""
        request = self.sizing.request
        facts = {"include": request.include, "recipe": self.host.name, "sequence_length": self._length}
        if self.host.rows is not None:
            facts["rows"] = "end to end"
        if request.may_stop_early:  # if larger forwards are worth their trials; about, as a probe takes time, too
            facts["samples_of_run"] = 1 << (self.run.epochs * self._samples_of_epoch).bit_length()
        path = self.folder / "probe.json"
        return cached_probe(self.host, self.sizing.settings, self.cache_inputs, facts, request, path, self._find)

    def probed(self, stored: StoredProbe) -> Probed:
        """Return what the run makes of a ``stored`` probe."""
        result, asked = stored.result, self.sizing.settings.micro_batch_size
        sizes = self.sizing.sizes_from_probe(
            stored.samples if self.sizing.bounds_forwards else result.batch_size, result.bound
        )
        if sizes.micro_batch_size != asked:
            log.warning("micro_batch_size=%s does not fit; using the maximum, %s", asked, sizes.micro_batch_size)
        return Probed(sizes, self.host.objective.size(self.sample), stored)

    def _find(self, settings: AdaptiveBatchingConfig, meter: MemoryMeter) -> ProbeResult:
        host, request, times = self.host, self.sizing.request, ForwardTimes(self._samples_left())
        if host.rows is not None:
            request = replace(request, suffices=-(-first_row(host.device.type) // self._length))
        step = training_step(host, self.sample, accumulates=request.in_parts, note=times.note)
        return find_largest(
            step, settings, meter, request, ranks=host.ranks, times=times, remedy=f"set {remedy(host)}",
            scratch=self.folder,
        )  # fmt: skip

    def _samples_left(self) -> float:
        """Return how many copies of the sample have as many tokens as the run has left on a device."""
        host, dataset = self.host, self.host.loader.dataset
        some = range(0, len(dataset), -(-len(dataset) // _TO_READ))
        tokens = sum(len(host.objective.tokens(dataset[index])) for index in some) / len(some)
        epochs = max(self.run.epochs - self.run.first_epoch, 1)
        return epochs * self._samples_of_epoch * tokens / self._length

    @property
    def _samples_of_epoch(self) -> int:
        samples, most = self.host.samples_per_rank, self.run.max_steps_per_epoch
        return samples if most is None else min(samples, most * self.run.window)


def sizing_of(host: Host, run: StockRun, settings: AdaptiveBatchingConfig) -> Sizing:
    """Return what the settings ask of a probe in a run that stock has laid out."""
    return size_up(settings, batch_size=run.batch_size, accumulation=run.accumulation, samples=host.samples_per_rank)


def find_maximum(host: Host, run: StockRun, sizing: Sizing, cache_inputs: CacheInputs, report: Report) -> Probed:
    """Find the largest batch size of a run: by a probe where one is needed, else from bounds and data."""
    if not sizing.probes:
        report.maximum(sizing.request.upper, sizing.request.upper_reason)
        return Probed(sizing.unprobed)
    settings = sizing.settings
    sample = worst_case_sample(
        host.loader.dataset, host.objective, sequence_length=settings.sequence_length, tokenizer_max=host.max_length,
        model_max=getattr(host.model, "max_seq_len", None), ranks=host.ranks,
    )  # fmt: skip
    probe = Probe(host, run, sizing, cache_inputs, sample, report.directory)
    start = time.perf_counter()
    stored = probe.find()
    length = len(host.objective.tokens(sample))
    report.probe(stored.result, sequence_length=length, waited=time.perf_counter() - start)
    return probe.probed(stored)


def stored_probe_in(stored: Mapping[str, Any]) -> StoredProbe | None:
    """Return what the probe of a run has found, from the state in its checkpoint; None if it had none."""
    text = stored.get("probe")
    if text is None:
        return None
    return read_stored(lambda: StoredProbe.from_dict(json.loads(text)), "the checkpoint's probe")


def cached_probe(
    host: Host,
    settings: AdaptiveBatchingConfig,
    cache_inputs: CacheInputs,
    facts: Mapping[str, Any],
    request: ProbeRequest,
    path: Path,
    find: Callable[[AdaptiveBatchingConfig, MemoryMeter], ProbeResult],
) -> StoredProbe:
    """Take the result that an earlier run has stored at ``path``, or find one and store it.

    ``facts`` are what memory depends on in this probe alone; ``find`` keeps within the settings that it is given. A
    device whose memory cannot be measured, or limits that leave none of it, are a :class:`ConfigError`.
    """
    try:
        meter = memory_meter(host.device)
    except NotImplementedError as error:
        raise ConfigError(str(error)) from error
    ranks, shares_memory = host.ranks, meter.device.type == "cpu"
    require_room(settings, meter, ranks, added=_ADDED_BY_TRAINING if shares_memory else 0)
    if shares_memory:
        settings = _with_room_for_training(settings, meter)
    run = {
        **cache_inputs.config(),
        **facts,
        "packed": is_packed(host.loader.dataset),
    }
    models = {str(index): described(model) for index, model in enumerate(host.models)}
    devices = described_devices(meter, ranks.size, is_sharded=host.collectives is not None)
    now = Conditions(plain(settings_of_memory(settings, request)), plain(run), models, versions_of(_VERSIONS), devices)
    available = int(ranks.smallest(memory_budget(settings, meter)))

    def before() -> StoredProbe | None:
        stored, source = cache_inputs.stored, "the checkpoint's probe"
        if stored is None:
            source = f"the stored probe {path}"
            stored = read_stored(lambda: StoredProbe.from_dict(json.loads(path.read_text())), source)
        held = taken_again(stored, now, request.upper, available, stays=cache_inputs.resumes, source=source)
        if held is not None:
            log.info("maximum batch size %d, from %s", held.result.batch_size, source)
        return held

    stored = ranks.on_first(before)
    if stored is not None:
        return stored
    stored = StoredProbe(find(settings, meter), now, request.upper, facts["sequence_length"])
    ranks.on_first(lambda: store_probe(path, stored))
    return stored


def _with_room_for_training(settings: AdaptiveBatchingConfig, meter: MemoryMeter) -> AdaptiveBatchingConfig:
    """Leave room for what the program adds while it trains, where tensors and program share the memory measured."""
    log.info("reserving %s for allocations outside of steps", memory_size(_ADDED_BY_TRAINING))
    if settings.memory_limit is None:
        least = MemoryAmount(num_bytes=_ADDED_BY_TRAINING)
        headroom = max(settings.headroom, least, key=lambda amount: amount.bytes_of(meter.total_bytes))
        return replace(settings, headroom=headroom)
    limit = max(settings.memory_limit.bytes_of(meter.total_bytes) - _ADDED_BY_TRAINING, 2**10)
    return replace(settings, memory_limit=replace(settings.memory_limit, num_bytes=limit, fraction=None))
