"""Measure on a GPU, in minutes, whether the probe is right, how fast training is, and what recovery costs.

    make bench DEVICE=cuda
    make bench DEVICE=cuda PYTHON=python3        # in an environment that is there already; installs nothing
    python benchmarks/gpu.py --device cpu --samples 128 --minutes 30    # the same on a small model, to try it out

- *Probe*: the models of ``probe_vs_peers.py`` in a memory limit that the allocator enforces. The truth is found by real
  steps in the same process, in the same limit, after the answer: the largest size that trains without the allocator
  emptying its cache, but in a first step, which is what the probe looks for. With retries more may run, and slower.
- *Throughput*: one epoch over text of Python's documentation, at most 512 tokens each, 64 samples in each optimizer
  step; real tokens in a second, the first steps left out. ``auto`` splits by length; packed data have no padding.
  The record of that run stays in ``results/gpu_<device>.jsonl``: ``dry-run --calibrate`` takes it.
- *Trainer*: an epoch with Hugging Face's, as ``gpu_trainer.py`` says; its record is ``gpu_trainer_<device>.jsonl``.
- *Recovery*: the same steps in seven tenths of the memory that they take, against all of it.

Each measurement is a process of its own, forked from one that has imported everything and has not touched the device.
The result file is written after each: what has been measured when time is up is there. What was left out or failed is
there as well, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gpu_imports  # before what imports torchao
import gpu_trainer
import probe_vs_peers
import torch
import trainer_vs_peers
from common import Recipe, write_report
from omegaconf import OmegaConf

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._memory.unused_memory import release_cached_memory
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizing import ProbeRequest
from adaptive_batching._torchtune.cli.quickstart import Architecture, build
from adaptive_batching.torchtune import AdaptiveBatching, load_stock

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks/results"
MIB = 2**20
ARCHITECTURES = {
    "cpu": Architecture(),
    # 0.8 billion parameters in few layers: work for the device is to outweigh the launches, with short samples, too.
    "cuda": Architecture(num_layers=8, num_heads=24, num_kv_heads=8, embed_dim=3072, intermediate_dim=8192),
}
WARM_UP_STEPS = 5
OURS, STOCK = "ours, micro_batch_size=auto", "stock, batch_size=64"
WAYS: dict[str, dict[str, Any]] = {
    STOCK: {"batch_size": 64},
    OURS: {"batch_size": 64, "micro_batch_size": "auto"},
    "stock, packed, 16 packs": {"batch_size": 16, "packed": True},
    "stock, 8 x 8 accumulated": {"batch_size": 8, "gradient_accumulation_steps": 8},
    "ours, recovery alone, batch_size=64": {"batch_size": 64, "adaptive_batching": {"recover_from_oom": True}},
    "stock, packed, 16 packs, compile": {"batch_size": 16, "packed": True, "compile": True},
    "ours, micro_batch_size=auto, compile": {"batch_size": 64, "micro_batch_size": "auto", "compile": True},
}
RECOVERY = "recovery"
TRAINER = {f"Trainer: {method}": method for method in gpu_trainer.METHODS}
CARD = "card and inputs"
stock = load_stock("full_finetune_single_device")


class Ours(AdaptiveBatching, stock.FullFinetuneRecipeSingleDevice):  # type: ignore[misc, name-defined]
    """The recipe of the same name."""


def prepare(inputs: str, device: str) -> dict[str, Any]:
    """Build data, tokenizer and model, and return the name of the device."""
    start = time.perf_counter()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):  # where weights are drawn in no time
        build(Path(inputs), architecture=ARCHITECTURES[device])
    return {"device_name": memory_meter(device).device_name, "seconds": round(time.perf_counter() - start, 1)}


def measure_probe(model: str, device: str) -> dict[str, Any]:
    """The answer of ``predict``, what it took, and the truth."""
    task = probe_vs_peers.Task(model, device)
    for _ in range(2):
        task.step(task.model, task.optimizer, task.batch(1))
    task.num_steps = 0
    task.set_limit()

    def run(batch: Any) -> None:
        task.step(task.model, task.optimizer, batch)

    config = AdaptiveBatchingConfig.from_mapping({"headroom": 0})
    step = TrainingStep(task.model, [task.optimizer], task.batch, run)
    result = find_largest(step, config, memory_meter(device), ProbeRequest(probe_vs_peers.MAX_SIZE, rounds=False))
    steps, errors = task.num_steps, task.num_out_of_memory
    answer = next(m for m in reversed(result.measurements) if m.fits and m.batch_size == result.batch_size)
    beyond = min((size for size, _ in result.predicted if size > result.batch_size), default=None)
    return {
        "answer": result.batch_size, "truth": probe_vs_peers.truth(task, task.fits_without_retries)(),
        "truth_with_retries": probe_vs_peers.truth(task)(), "steps": steps, "errors": errors,
        "seconds": round(result.seconds, 1), "budget_mib": result.budget_bytes // MIB,
        "reserved_mib": result.peak_bytes // MIB, "allocated_mib": (answer.in_use_bytes or 0) // MIB,
        "next_predicted_mib": dict(result.predicted)[beyond] // MIB if beyond is not None else None,
    }  # fmt: skip


def config_of(inputs: str, output_dir: str, device: str, samples: int, **fields: Any) -> Any:
    """The quickstart's config, for one epoch in which no sample is cut short."""
    cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
    packed = fields.pop("packed", False)
    cfg.update(
        data_dir=inputs, output_dir=output_dir, device=device, epochs=1, dtype="bf16" if device == "cuda" else "fp32",
        use_maximum_batch_size=False, batch_increase_function=None, clip_grad_norm=None,
        optimizer={"_component_": "torch.optim.SGD", "lr": 0.1 if device == "cpu" else 0.01},  # with 0.1 it diverges
        model={**cfg.model, **asdict(ARCHITECTURES[device])}, **{"adaptive_batching": {}, **fields},
    )  # fmt: skip
    cfg.tokenizer.max_seq_len = 512
    cfg.dataset.packed, cfg.dataset.split = packed, f"train[:{samples}]"
    if device == "cpu":
        cfg.adaptive_batching = {"memory_limit": "2GiB"}
    return cfg


def ratio(above: float, below: float) -> float | None:
    """Return one over the other; None for a count or a loss of 0, as where the device computes nothing."""
    return round(above / below, 3) if below else None


def train(recipe: Recipe) -> tuple[list[float], list[float], float, float | None]:
    """Train an epoch.

    Returns:
        The losses and seconds of all steps, real tokens in a second, and padded over real tokens, None where none were
        counted; the last two without the first steps.
    """
    device, pad_id = recipe._device, recipe._tokenizer.pad_id
    real, padded = torch.zeros((), device=device), 0
    losses: list[float] = []
    marks: list[tuple[float, float, int]] = []  # time, real and padded tokens so far

    def count(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal padded
        tokens = kwargs["tokens"]
        real.add_((tokens != pad_id).sum())
        padded += tokens.numel()

    def log(payload: dict[str, Any], step: int) -> None:
        losses.append(float(payload["loss"]))  # waits for the device
        marks.append((time.perf_counter(), float(real), padded))

    recipe._model.register_forward_pre_hook(count, with_kwargs=True)
    recipe._metric_logger.log_dict = log
    recipe.save_checkpoint = lambda epoch: None
    recipe.train()
    if len(marks) < 2:
        sys.exit(f"{len(marks)} steps are too few to be timed; raise --samples")
    first, last = marks[min(WARM_UP_STEPS, len(marks) - 2)], marks[-1]
    seconds, tokens, with_padding = (b - a for a, b in zip(first, last, strict=True))
    of_steps = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    return losses, of_steps, tokens / seconds, ratio(with_padding, tokens)


def late(seconds: list[float]) -> float:
    """Return the median of the second half of a run's steps, by which all is found and compiled."""
    return statistics.median(seconds[len(seconds) // 2 :])


def measure_way(way: str, inputs: str, device: str, samples: int) -> dict[str, Any]:
    """Train an epoch in one way."""
    with tempfile.TemporaryDirectory() as output_dir:
        cfg = config_of(inputs, output_dir, device, samples, **WAYS[way])
        recipe = (Ours if way.startswith("ours") else stock.FullFinetuneRecipeSingleDevice)(cfg)
        start = time.perf_counter()
        recipe.setup(cfg)
        set_up = time.perf_counter() - start
        meter = memory_meter(device)
        meter.release()
        meter.reset_peak()
        losses, seconds, speed, padding = train(recipe)
        if way == OURS:
            shutil.copy(Path(output_dir) / "adaptive_batching" / "report.jsonl", RECORDS / f"gpu_{device}.jsonl")
        return {
            "tokens_per_second": round(speed), "padded_over_real": padding,
            "set_up_seconds": round(set_up, 1), "seconds_of_a_late_step": round(late(seconds), 3),
            "peak_mib": meter.peak_bytes() // MIB, "steps": len(losses),
            "last_loss": losses[-1],
        }  # fmt: skip


def measure_recovery(inputs: str, device: str, samples: int) -> dict[str, Any]:
    """Train with all of the memory and with seven tenths of what that took."""
    found: list[tuple[list[float], list[float]]] = []
    meter = memory_meter(device)
    recoveries = 0
    room = 2**62
    for _ in range(2):
        with tempfile.TemporaryDirectory() as output_dir:
            cfg = config_of(inputs, output_dir, device, samples, batch_size=64)
            cfg.adaptive_batching = {"recover_from_oom": True}
            recipe = Ours(cfg)
            recipe.setup(cfg)
            release_cached_memory(meter.device)
            resting = meter.used_bytes()
            meter.reset_peak()
            with meter.limit(min(resting + room, 2**60)):
                losses, seconds, *_ = train(recipe)
            found.append((losses, seconds))
            run: Any = recipe._planned_run
            recoveries = run.split_policy.limit.num_recoveries
            room = int(0.7 * (meter.peak_allocated_bytes() - resting))
    (free, seconds), (limited, longer) = found
    return {
        "recoveries": recoveries,
        "seconds_ratio_of_all_steps": ratio(sum(longer), sum(seconds)),
        "seconds_ratio_of_late_steps": ratio(late(longer), late(seconds)),
        "seconds_of_the_slowest": round(max(longer), 2),
        "loss_difference": max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(limited, free, strict=True)),
    }


def in_a_fork(run: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Return what ``run`` returns in a forked process, or under ``failed`` why it did not."""
    with tempfile.TemporaryDirectory() as folder:
        log, answer = Path(folder, "log"), Path(folder, "answer.json")

        def in_child() -> None:
            os.setsid()
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            whole = log.with_name("whole.json")
            whole.write_text(json.dumps(run()))
            whole.replace(answer)

        child = multiprocessing.get_context("fork").Process(target=in_child)
        child.start()
        deadline = time.monotonic() + seconds
        while child.is_alive() and not answer.exists() and time.monotonic() < deadline:
            child.join(0.05)
        is_late = child.is_alive() and not answer.exists()  # with an answer, its end is not waited for
        with contextlib.suppress(ProcessLookupError):  # with what it has started
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        if answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text())
            return found
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = f"stopped after {seconds:.0f} s" if is_late else f"status {child.exitcode}"
        return {"failed": f"{why}: " + " / ".join(lines[-4:])[-600:]}


class Results:
    """Measurements so far, written to the result file after each.

    Args:
        args: Of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.found: dict[str, dict[str, Any]] = {}
        self._deadline = gpu_imports.STARTED + 60 * args.minutes

    def measure(self, what: str, run: Callable[[], dict[str, Any]]) -> None:
        """Run one measurement in a forked process, as long as there is time."""
        left = self._deadline - time.monotonic()
        start = time.monotonic()
        if left < 8:
            self.found[what] = {"failed": f"left out: {self._args.minutes:g} minutes were over"}
        else:
            self.found[what] = in_a_fork(run, min(left, self._args.seconds))
        shown = {key: value for key, value in self.found[what].items() if key != "losses"}
        print(f"{what}, {time.monotonic() - start:.0f} s: {shown}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the result file, with what is still missing."""
        rows = ["## Probe", ""]
        rows += self._table([*probe_vs_peers.WORKLOADS])
        rows += ["", "## Throughput", "", *self._table([*WAYS]), "", "## Trainer", "", *self._table([*TRAINER])]
        rows += ["", "## Recovery", "", *self._table([RECOVERY])]
        reasons = [f"- {what}: {found['failed']}" for what, found in self.found.items() if "failed" in found]
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "default"
        write_report(
            "On a GPU: the probe's accuracy, throughput, and recovery",
            device=self._args.device,
            facts=[f"{self._args.samples} samples; allocator settings: {settings}"],
            rows=[*rows, *(["", "Not measured:", "", *reasons] if reasons else [])],
            figures=self._figures(),
            output=self._args.output,
            packages=("torch", "torchtune", "torchao", "transformers", "accelerate"),
            quiet=True,
            device_name=self.found.get(CARD, {}).get("device_name", self._args.device),
        )

    def _table(self, names: list[str]) -> list[str]:
        measured = {name: self.found[name] for name in names if "failed" not in self.found.get(name, {"failed": ""})}
        measured = gpu_trainer.with_differences(measured)
        if not measured:
            return ["nothing yet"]
        columns = [*next(iter(measured.values()))]
        rows = ["| | " + " | ".join(column.replace("_", " ") for column in columns) + " |"]
        rows.append("|---" * (len(columns) + 1) + "|")
        return rows + [
            f"| {name} | " + " | ".join(_shown(values[column]) for column in columns) + " |"
            for name, values in measured.items()
        ]

    def _figures(self) -> dict[str, float | None]:
        probes = [self.found[name] for name in probe_vs_peers.WORKLOADS if "truth" in self.found.get(name, {})]
        speeds = {way: self.found[way]["tokens_per_second"] for way in WAYS if "steps" in self.found.get(way, {})}
        figures: dict[str, float | None] = {}
        if probes:
            figures["max_gap_to_truth"] = max(abs(each["answer"] - each["truth"]) for each in probes)
            figures["median_reserved_over_allocated"] = round(
                statistics.median(each["reserved_mib"] / each["allocated_mib"] for each in probes), 3
            )
        for name, other in [("auto_vs_stock", STOCK), ("auto_vs_packed", "stock, packed, 16 packs")]:
            if OURS in speeds and other in speeds:
                figures[name] = ratio(speeds[OURS], speeds[other])
        of_trainer = {
            way: self.found[way]["tokens_per_second"] for way in TRAINER if "steps" in self.found.get(way, {})
        }
        ours = f"Trainer: {trainer_vs_peers.OURS}"
        for way in of_trainer:
            if way != ours and ours in of_trainer:
                figures[f"adaptive_vs_{way.removeprefix('Trainer: ')}"] = ratio(of_trainer[ours], of_trainer[way])
        return figures


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and not value.is_integer() else str(value)


def main() -> None:
    """Measure one after the other, the most telling first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(ARCHITECTURES), default="cuda")
    parser.add_argument("--samples", type=int, default=1536)
    parser.add_argument("--minutes", type=float, default=8.5, help="nothing is begun or goes on after this long")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu_<device>.md")
    parser.add_argument("--seconds", type=float, default=75, help="for one measurement at most")
    parser.add_argument("--only", default="", help="measurements with this in their name")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: --device cuda needs a CUDA device, and torch sees none; --device cpu tries the benchmark out")
    assert not torch.cuda.is_initialized()  # a forked process could not use it
    if args.device == "cpu" and not probe_vs_peers.TAME_MALLOC.items() <= os.environ.items():  # glibc reads it first
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **probe_vs_peers.TAME_MALLOC})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

    results = Results(args)
    device, samples = args.device, args.samples
    data = gpu_trainer.samples_of(device, trainer_vs_peers.BATCH_SIZE * gpu_trainer.STEPS)
    record = RECORDS / f"gpu_trainer_{device}.jsonl"
    first, *others = probe_vs_peers.WORKLOADS
    ways, trainers = [*WAYS], [*TRAINER]
    with tempfile.TemporaryDirectory() as directory:
        inputs = f"{directory}/inputs"
        results.measure(CARD, lambda: prepare(inputs, device))
        for what in [*ways[:2], *trainers[:4], first, RECOVERY, ways[2], *trainers[4:], *others, *ways[3:]]:
            if args.only not in what:
                continue
            if what in WAYS:
                results.measure(what, partial(measure_way, what, inputs, device, samples))
            elif what in TRAINER:
                results.measure(what, partial(gpu_trainer.measure_trainer, TRAINER[what], device, data, record))
            elif what == RECOVERY:
                results.measure(what, partial(measure_recovery, inputs, device, samples // 2))
            else:
                results.measure(what, partial(measure_probe, what, device))
    print(json.dumps(results._figures()))


if __name__ == "__main__":
    main()
