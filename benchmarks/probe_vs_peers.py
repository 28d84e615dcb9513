"""Compare searches for the largest batch size, for the same torchtune models in the same real memory limit.

    pip install -e .[bench]
    pip install --no-deps ludwig                         # its search needs torch alone; Ludwig needs ninety packages
    python benchmarks/probe_vs_peers.py                  # about half an hour on 2 cores, most of it for DeepSpeed
    python benchmarks/probe_vs_peers.py --device cuda --repeats 3

Every method runs in a fresh process with the same seed, model, optimizer and samples. After two warm-up steps at batch
size 1 the process may take a fixed amount of memory more (RLIMIT_DATA on the cpu, the allocator's fraction on CUDA),
and only the search is timed. The truth is found by real steps in two processes of its own: every size around the
boundary is run. Methods alternate. Peers keep their own defaults:

- Lightning's ``Tuner.scale_batch_size`` starts at 2 and runs 3 steps at each size; with ``binsearch`` it takes a
  ``margin`` of 5 % off what it found, in versions that have it.
- Accelerate's ``find_executable_batch_size`` starts at 128 and takes 10 % off until a size fits.
- Ludwig's ``BatchSizeEvaluator`` starts at 1, doubles while 5 steps at a size give more samples a second than at the
  last, and ends at the first error. It knows CUDA's out-of-memory error alone: here the cpu's is raised as that one.
- DeepSpeed's autotuner runs each size in processes of its own (``deepspeed_trial.py``), and each of them sets the
  limit. It looks for the largest size, then for the fastest near it, which is its answer. Without ``pdsh`` it says that
  it could not clean up after a trial; nothing needs to be. Its engine takes the steps, so that its largest size may be
  a sample off the truth.
- Doubling and bisection with one step at each size, as one writes it by hand.

Ludwig and DeepSpeed look for the fastest size, so that less than the truth may be what they want.

A training step is one forward of the model in training mode with gradients, whether or not the step ends well. The
last line printed is a JSON object about ``predict``: the worst over models. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ProcessFailed, by_bisection, largest_of_all, measure_in_fresh_process, write_report
from torch.nn import functional
from torchtune import modules, training
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.caching_allocator import RETRIES, counted
from adaptive_batching._memory.meter import memory_meter
from adaptive_batching._memory.out_of_memory import is_out_of_memory
from adaptive_batching._probe.find import find_largest
from adaptive_batching._probe.probed_step import TrainingStep
from adaptive_batching._probe.sizing import ProbeRequest

PACKAGES = ("torch", "torchtune", "torchao", "lightning", "accelerate", "ludwig", "deepspeed")
OURS, DEFAULTS, TRUTH = "adaptive_batching predict", "adaptive_batching, defaults (rounded)", "truth"
INSTALLED = {package.name: package.version for package in importlib.metadata.distributions()}
MAX_SIZE = 8192  # where Lightning gives up; the upper bound of predict, too
# glibc: freed memory goes back to the system at once, so that the limit is about memory in use.
TAME_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
# (width, length): models are this much wider, samples this much longer. The memory of a sample, and with it the limit,
# grows with their product, so that the truth stays about the same.
SCALE = {"cpu": (1, 1), "cuda": (4, 4)}


@dataclass(frozen=True)
class Workload:
    """What is fine-tuned, before scaling, and the memory that a step may take beyond what rests after warm-up."""

    sequence_length: int
    limit_mib: int
    lora: bool = False
    activation_checkpointing: bool = False


WORKLOADS = {
    "full": Workload(sequence_length=256, limit_mib=750),
    "LoRA": Workload(sequence_length=192, limit_mib=850, lora=True),
    "full, activation checkpointing": Workload(sequence_length=128, limit_mib=578, activation_checkpointing=True),
}


class Task:
    """What a method gets: model, optimizer, samples, and a training step that is counted."""

    def __init__(self, name: str, device: str) -> None:
        workload, self.name = WORKLOADS[name], name
        torch.manual_seed(0)
        self.device = torch.device(device)
        width, length = SCALE[device]
        self.vocab_size, self.sequence_length = 4096 * width, workload.sequence_length * length
        self.limit_bytes = workload.limit_mib * width * length * 2**20
        sizes = dict(
            vocab_size=self.vocab_size, num_layers=4, num_heads=4 * width, num_kv_heads=2 * width,
            embed_dim=256 * width, intermediate_dim=768 * width, max_seq_len=self.sequence_length,
        )  # fmt: skip
        with self.device:
            if workload.lora:
                self.model = lora_llama3(lora_attn_modules=["q_proj", "v_proj"], lora_rank=8, lora_alpha=16, **sizes)
                set_trainable_params(self.model, get_adapter_params(self.model))
            else:
                self.model = llama3(**sizes)
        if workload.activation_checkpointing:
            training.set_activation_checkpointing(self.model, {modules.TransformerSelfAttentionLayer})
        self.model.train()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self.num_steps = self.num_out_of_memory = 0
        original = self.model

        def count(module: torch.nn.Module, args: Any) -> None:
            self.num_steps += module is original and module.training and torch.is_grad_enabled()

        self.model.register_forward_pre_hook(count)

    def sample(self) -> dict[str, torch.Tensor]:
        return {key: torch.randint(self.vocab_size, (self.sequence_length,)) for key in ("tokens", "labels")}

    def batch(self, batch_size: int) -> dict[str, torch.Tensor]:
        collated = torch.utils.data.default_collate([self.sample() for _ in range(batch_size)])
        return {key: value.to(self.device) for key, value in collated.items()}

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["tokens"])  # [b, s, v]
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
        with self.failures_counted():
            self.loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def failures_counted(self) -> Iterator[None]:
        try:
            yield
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            self.num_out_of_memory += is_out_of_memory(error)
            raise

    def clear(self) -> None:
        """Free what a failed step leaves behind."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def fits(self, batch_size: int) -> bool:
        """True if a step ends, however often the allocator has to empty its cache in it."""
        return self._runs(batch_size, steps=1)

    def fits_without_retries(self, batch_size: int) -> bool:
        """True if steps follow one another as in training: but for the first, none empties the allocator's cache."""
        return self._runs(batch_size, steps=3, retries=False)

    def _runs(self, batch_size: int, *, steps: int, retries: bool = True) -> bool:
        failed = strained = False
        try:
            for number in range(steps):
                before = counted(self.device, RETRIES)
                self.step(self.model, self.optimizer, self.batch(batch_size))
                strained |= number > 0 and counted(self.device, RETRIES) > before
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        self.clear()  # not in the except block: there the traceback keeps the step's tensors alive
        return not failed and (retries or not strained)

    def set_limit(self) -> None:
        """From now on this process may take ``limit_bytes`` more."""
        self.clear()
        if self.device.type == "cuda":
            self.limit_bytes += torch.cuda.memory_reserved()
            torch.cuda.set_per_process_memory_fraction(self.limit_bytes / torch.cuda.mem_get_info()[1])
        else:
            status = Path("/proc/self/status").read_text().splitlines()
            self.limit_bytes += next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


# A method imports and builds what it needs before the limit is set, and returns the search to be timed.
Search = Callable[[], int]


def predict(task: Task, **settings: Any) -> Search:
    def run(batch: Any) -> None:
        task.step(task.model, task.optimizer, batch)

    def search() -> int:
        config = AdaptiveBatchingConfig.from_mapping({"headroom": 0, **settings})
        step = TrainingStep(task.model, [task.optimizer], task.batch, run)
        request = ProbeRequest(MAX_SIZE, rounds=config.round_to_power_of_two)
        return find_largest(step, config, memory_meter(task.device), request).batch_size

    return search


def lightning(task: Task, mode: str) -> Search:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner.tuning import Tuner

    class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4 * MAX_SIZE

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return task.sample()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = task.model, 2

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return task.loss(self.model, batch)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            with task.failures_counted():  # forward and backward run in here, as the optimizer's closure
                super().optimizer_step(*args, **kwargs)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.optimizer

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Samples(), batch_size=self.batch_size)

    trainer = pl.Trainer(
        accelerator="gpu" if task.device.type == "cuda" else "cpu", devices=1, gradient_clip_val=1.0,
        default_root_dir=tempfile.gettempdir(), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    return lambda: Tuner(trainer).scale_batch_size(module, mode=mode) or 0  # None where it is not asked to


def accelerate(task: Task) -> Search:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size
    def train(batch_size: int) -> int:
        task.optimizer.zero_grad(set_to_none=True)  # a failed step's; Accelerate's examples build the model anew here
        task.step(task.model, task.optimizer, task.batch(batch_size))
        return batch_size

    return train


def ludwig(task: Task) -> Search:
    from ludwig.utils.batch_size_tuner import BatchSizeEvaluator

    class Evaluator(BatchSizeEvaluator):
        def reset(self) -> None:
            task.optimizer.zero_grad()

        def step(self, batch_size: int, global_max_sequence_length: int | None = None) -> None:
            try:
                task.step(task.model, task.optimizer, task.batch(batch_size))
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise torch.OutOfMemoryError(str(error)) from None
                raise

    return lambda: Evaluator().select_best_batch_size(dataset_len=4 * MAX_SIZE)


def deepspeed(task: Task) -> Search:
    def search() -> int:
        # The limit is for the processes that DeepSpeed starts: each sets it for itself.
        resource.setrlimit(resource.RLIMIT_DATA, (resource.getrlimit(resource.RLIMIT_DATA)[1],) * 2)
        with tempfile.TemporaryDirectory() as folder:
            run_autotuner(task, Path(folder))
            counts = [json.loads(line) for line in Path(folder, "counts.jsonl").read_text().splitlines()]
            task.num_steps = sum(count["steps"] for count in counts)
            task.num_out_of_memory = sum(count["ooms"] for count in counts)
            best = json.loads(Path(folder, "autotuning_results", "ds_config_optimal.json").read_text())
        return best["train_micro_batch_size_per_gpu"]

    return search


def run_autotuner(task: Task, folder: Path) -> None:
    """Run DeepSpeed's autotuner with its defaults in ``folder``; it starts ``deepspeed_trial.py`` for each size."""
    settings = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0, "autotuning": {"enabled": True},
    }  # fmt: skip
    Path(folder, "settings.json").write_text(json.dumps(settings))
    trial = [str(Path(__file__).with_name("deepspeed_trial.py")), "--model", task.name, "--device", task.device.type]
    command = ["deepspeed", "--num_gpus", "1", "--autotuning", "tune", *trial, "--deepspeed_config", "settings.json"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "DS_ACCELERATOR": task.device.type}
    subprocess.run(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, check=True)


def by_hand(task: Task) -> Search:
    return partial(by_bisection, task.fits)


def truth(task: Task, fits: Callable[[int], bool] | None = None) -> Search:
    return partial(largest_of_all, fits or task.fits)


# name: (the package it needs, how to prepare it)
METHODS: dict[str, tuple[str, Callable[[Task], Search]]] = {
    OURS: ("torch", lambda task: predict(task, round_to_power_of_two=False)),
    DEFAULTS: ("torch", predict),
    "Lightning power": ("lightning", lambda task: lightning(task, "power")),
    "Lightning binsearch": ("lightning", lambda task: lightning(task, "binsearch")),
    "Accelerate": ("accelerate", accelerate),
    "Ludwig": ("ludwig", ludwig),
    "DeepSpeed autotuning": ("deepspeed", deepspeed),
    "doubling + bisection": ("torch", by_hand),
    TRUTH: ("torch", truth),
}


def measure(model: str, method: str, device: str) -> dict[str, Any]:
    """Run one search in this process, which is not fit for another one afterwards."""
    task = Task(model, device)
    search = METHODS[method][1](task)
    for _ in range(2):
        task.step(task.model, task.optimizer, task.batch(1))
    task.num_steps = 0
    task.set_limit()
    start = time.perf_counter()
    answer = search()
    seconds = time.perf_counter() - start
    return {"answer": answer, "steps": task.num_steps, "ooms": task.num_out_of_memory, "seconds": round(seconds, 2)}


def run_in_fresh_process(model: str, method: str, device: str, cpus: int) -> dict[str, Any]:
    """What :func:`measure` returns, or ``{"error": ...}``, with the names of model and method."""
    environment = {**TAME_MALLOC, "OMP_NUM_THREADS": str(cpus)}
    try:
        found = measure_in_fresh_process("--device", device, "--measure", model, method, environment=environment)
    except ProcessFailed as error:
        if method in (OURS, TRUTH):
            raise
        found = {"error": str(error).splitlines()[-1]}
    return {"model": model, "method": method, **found}


def evaluate(results: list[dict[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """A Markdown table, medians where there are repeats, and the worst of our method over models and repeats."""

    def values(key: str, method: str, model: str) -> list[Any]:
        return [r[key] for r in results if r["method"] == method and r["model"] == model and key in r]

    columns = ["model", "truth", "method", "answer", "training steps", "out of memory", "seconds"]
    rows = ["| " + " | ".join([*columns, "answer/truth", "seconds/ours"]) + " |", "|---" * 9 + "|"]
    gaps, ratios = [], []
    for model in WORKLOADS:
        truths = sorted(set(values("answer", TRUTH, model)))
        ours = statistics.median(values("seconds", OURS, model))
        gaps += [abs(answer - truths[-1]) for answer in values("answer", OURS, model)]
        for method in METHODS:
            measured, errors = values("seconds", method, model), values("error", method, model)
            if method == TRUTH or not (measured or errors):
                continue
            if errors:
                cells = [f"failed: {errors[0]}", *[""] * 5]
            else:
                seconds = statistics.median(measured)
                counts = [statistics.median_low(values(key, method, model)) for key in ("answer", "steps", "ooms")]
                cells = [*counts, f"{seconds:.1f}", f"{counts[0] / truths[-1]:.2f}", f"{seconds / ours:.2f}"]
                ratios += [ours / seconds] if method not in (OURS, DEFAULTS) else []
            rows.append("| " + " | ".join(map(str, [model, "-".join(map(str, truths)), method, *cells])) + " |")
    return rows, {
        "max_gap_to_truth": max(gaps),
        "max_training_steps": max(n for model in WORKLOADS for n in values("steps", OURS, model)),
        "max_ooms": max(n for model in WORKLOADS for n in values("ooms", OURS, model)),
        "seconds_vs_best_peer": round(max(ratios), 2),
    }


def main() -> None:
    """Measure everything, each in a process of its own, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SCALE), default="cpu")
    parser.add_argument("--repeats", type=int, default=1, help="searches per model and method; the table has medians")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/probe_vs_peers_<device>.md")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "METHOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        model, method = args.measure
        print(json.dumps(measure(model, method, args.device)))
        return

    start, cpus = time.perf_counter(), len(os.sched_getaffinity(0))
    left_out = [f"{m} is left out: {p} is not installed" for m, (p, _) in METHODS.items() if p not in INSTALLED]
    print("\n".join(left_out or ["every peer is installed"]), flush=True)
    methods = [method for method, (package, _) in METHODS.items() if package in INSTALLED and method != TRUTH]
    results = []
    for repeat in range(args.repeats):
        for shift, model in enumerate(WORKLOADS, start=repeat):
            order = [methods[(shift + i) % len(methods)] for i in range(len(methods))]
            for method in [TRUTH, *order, TRUTH] if repeat == 0 else order:
                results.append(run_in_fresh_process(model, method, args.device, cpus))
                print(*(f"{key}: {value}" for key, value in results[-1].items()), sep=", ", flush=True)

    rows, worst = evaluate(results)
    width, length = SCALE[args.device]
    limits = [f"{w.limit_mib * width * length} MiB at {w.sequence_length * length} tokens" for w in WORKLOADS.values()]
    write_report(
        "Search for the largest batch size: predict and its peers",
        device=args.device,
        facts=[
            *(f"{model}: {limit}" for model, limit in zip(WORKLOADS, limits, strict=True)),
            f"repeats: {args.repeats}; two truths are the noise of the limit; "
            f"{(time.perf_counter() - start) / 60:.1f} minutes",
            *left_out,
        ],
        rows=rows,
        figures=worst,
        output=args.output,
        packages=PACKAGES,
    )


if __name__ == "__main__":
    main()
