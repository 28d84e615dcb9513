"""Compare searches for the largest batch size, for the same torchtune models in the same real memory limit.

    python benchmarks/probe_vs_peers.py                  # about 10 minutes on 2 cores
    python benchmarks/probe_vs_peers.py --device cuda --repeats 3

Every method runs in a fresh process with the same seed, model, optimizer and samples. After two warm-up steps at batch
size 1 the process may take a fixed amount of memory more (RLIMIT_DATA on the cpu, the fraction that the caching
allocator enforces on CUDA), and only the search is timed, imports are not. The truth is found by real steps, in two
processes of its own: every size around the boundary is run. Methods alternate. Peers keep their own defaults:

- Lightning's ``Tuner.scale_batch_size`` runs 3 steps at each size; with ``binsearch`` it takes 5 % off what it found
  (its ``margin``, where the version has it).
- Accelerate's ``find_executable_batch_size`` starts at 128 and takes 10 % off until a size fits.
- Doubling and bisection with one step at each size, as one writes it by hand.

A training step is one forward of the model in training mode with gradients, whether or not the step ends well; the
traces of ``predict`` allocate nothing and are no training steps, but their time counts. The last line printed is a JSON
object about ``predict``, the worst over models and repeats. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OURS = "adaptive_batching predict"
TRUTH = "truth"
REQUIRES = {"Lightning power": "lightning", "Lightning binsearch": "lightning", "Accelerate": "accelerate"}
PACKAGES = ("torch", "torchtune", "torchao", "lightning", "accelerate")
MAX_SIZE = 8192  # no search looks further; Lightning's default
# On the cpu only with these does freed memory go back to the system, so that the limit is about memory in use.
TAME_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Workload:
    """A model to fine-tune and the memory that the search may take beyond what rests after warm-up."""

    name: str
    sequence_length: int
    limit_mib: int
    lora: bool = False
    activation_checkpointing: bool = False
    width: int = 1

    def on(self, device: str) -> Workload:
        """Larger on an accelerator. A sample's memory grows with width and length, so the answer stays about the same."""
        width, length = (4, 2) if device == "cuda" else (1, 1)
        limit = self.limit_mib * width * length
        return replace(self, width=width, sequence_length=self.sequence_length * length, limit_mib=limit)


WORKLOADS = (
    Workload("full", sequence_length=256, limit_mib=900),
    Workload("LoRA", sequence_length=128, limit_mib=900, lora=True),
    Workload("full, activation checkpointing", sequence_length=128, limit_mib=900, activation_checkpointing=True),
)


class Task:
    """What a method gets: model, optimizer, samples, and a training step whose runs and failures are counted."""

    def __init__(self, workload: Workload, device: str) -> None:
        import torch
        from torchtune import modules, training
        from torchtune.models.llama3 import llama3, lora_llama3
        from torchtune.modules.peft import get_adapter_params, set_trainable_params

        torch.manual_seed(0)
        self.device = torch.device(device)
        self.sequence_length, self.vocab_size = workload.sequence_length, 4096 * workload.width
        sizes = dict(
            vocab_size=self.vocab_size, num_layers=4, num_heads=4 * workload.width, num_kv_heads=2 * workload.width,
            embed_dim=256 * workload.width, intermediate_dim=768 * workload.width, max_seq_len=1024,
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
        self.num_steps = 0
        self.num_out_of_memory = 0

        original = self.model

        def count(module: torch.nn.Module, args: Any) -> None:
            # predict traces a copy of the model under fake tensors, to which this hook is copied too
            self.num_steps += module is original and module.training and torch.is_grad_enabled()

        self.model.register_forward_pre_hook(count)

    def sample(self) -> dict[str, Any]:
        import torch

        return {key: torch.randint(self.vocab_size, (self.sequence_length,)) for key in ("tokens", "labels")}

    def batch(self, batch_size: int) -> dict[str, Any]:
        import torch

        collated = torch.utils.data.default_collate([self.sample() for _ in range(batch_size)])
        return {key: value.to(self.device) for key, value in collated.items()}

    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        from torch.nn import functional

        logits = model(batch["tokens"])  # [b, s, v]
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def update(self, model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
        """One full training step."""
        import torch

        with self.failures_counted():
            self.loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def failures_counted(self) -> Iterator[None]:
        from adaptive_batching.memory import is_out_of_memory

        try:
            yield
            if self.device.type == "cuda":
                import torch

                torch.cuda.synchronize()
        except Exception as error:
            self.num_out_of_memory += is_out_of_memory(error)
            raise

    def clear(self) -> None:
        """What a failed step may leave behind."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()

    def limit(self, extra_bytes: int) -> int:
        """From now on the process may take ``extra_bytes`` more; on CUDA returns what the allocator may hold in all."""
        import torch

        self.clear()
        if self.device.type == "cuda":
            allowed = torch.cuda.memory_reserved() + extra_bytes
            torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.mem_get_info()[1])
            return allowed
        import resource

        status = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + extra_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        return used + extra_bytes


# A method imports and builds what it needs, before the limit is set, and returns the search: allowed bytes -> answer.
Search = Callable[[int], int | None]


def predict(task: Task) -> Search:
    from adaptive_batching.config import AdaptiveBatchingConfig
    from adaptive_batching.memory import memory_meter
    from adaptive_batching.probe import find_maximum_batch_size
    from adaptive_batching.trial import TrainingStep

    def bind(model: Any, optimizers: Any) -> Callable[[dict[str, Any]], None]:
        return lambda batch: task.update(model, optimizers[0], batch)

    def search(allowed_bytes: int) -> int:
        # On the cpu the limit is read from the process. CUDA does not count it into the free memory that it reports.
        limit = {"memory_limit": allowed_bytes} if task.device.type == "cuda" else {}
        settings = {"search": "predict", "round_to_power_of_two": False, "headroom": 0, **limit}
        config = AdaptiveBatchingConfig.from_mapping(settings)
        step = TrainingStep(task.model, [task.optimizer], task.batch, bind)
        return find_maximum_batch_size(step, config, memory_meter(task.device), upper=MAX_SIZE).batch_size

    return search


def lightning_tuner(mode: str) -> Callable[[Task], Search]:
    def prepare(task: Task) -> Search:
        import lightning.pytorch as pl
        import torch
        from lightning.pytorch.tuner import Tuner

        class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
            def __len__(self) -> int:
                return 4 * MAX_SIZE

            def __getitem__(self, index: int) -> dict[str, Any]:
                return task.sample()

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model, self.batch_size = task.model, 2

            def training_step(self, batch: dict[str, Any], index: int) -> Any:
                return task.loss(self.model, batch)

            def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                with task.failures_counted():  # forward and backward run inside, as the optimizer's closure
                    super().optimizer_step(*args, **kwargs)

            def configure_optimizers(self) -> Any:
                return task.optimizer

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(Samples(), batch_size=self.batch_size)

        trainer = pl.Trainer(
            accelerator="gpu" if task.device.type == "cuda" else "cpu", devices=1, gradient_clip_val=1.0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tempfile.mkdtemp(),
        )  # fmt: skip
        module = Module()
        return lambda _: Tuner(trainer).scale_batch_size(module, mode=mode)

    return prepare


def accelerate(task: Task) -> Search:
    from accelerate.utils import find_executable_batch_size

    def train(batch_size: int) -> int:
        task.optimizer.zero_grad(set_to_none=True)  # of a failed step; Accelerate's examples build all anew here
        task.update(task.model, task.optimizer, task.batch(batch_size))
        return batch_size

    return lambda _: find_executable_batch_size(train, starting_batch_size=128)()


def fits(task: Task, batch_size: int) -> bool:
    from adaptive_batching.memory import is_out_of_memory

    failed = False
    try:
        task.update(task.model, task.optimizer, task.batch(batch_size))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = True
    task.clear()  # not in the except block: there the traceback keeps the step's tensors alive
    return not failed


def by_hand(task: Task) -> Search:
    def search(_: int) -> int:
        low, high = 0, 1
        while fits(task, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if fits(task, middle):
                low = middle
            else:
                high = middle
        return low

    return search


def truth(task: Task) -> Search:
    """The largest size that fits, of all sizes from 4 below the boundary up to 4 failures in a row above it."""

    def search(allowed_bytes: int) -> int:
        largest = by_hand(task)(allowed_bytes)
        size = max(largest - 4, 1)
        while size <= largest + 4:
            if fits(task, size):
                largest = max(largest, size)
            size += 1
        return largest

    return search


METHODS: dict[str, Callable[[Task], Search]] = {
    OURS: predict,
    "Lightning power": lightning_tuner("power"),
    "Lightning binsearch": lightning_tuner("binsearch"),
    "Accelerate": accelerate,
    "doubling, bisection": by_hand,
}


def measure(workload: Workload, method: str, device: str) -> dict[str, Any]:
    """Run one search in this process, which is not fit for another one afterwards."""
    import torch

    warnings.simplefilter("ignore")
    task = Task(workload, device)
    search = {**METHODS, TRUTH: truth}[method](task)
    for _ in range(2):
        task.update(task.model, task.optimizer, task.batch(1))
    task.num_steps = 0
    allowed_bytes = task.limit(workload.limit_mib * 2**20)
    start = time.perf_counter()
    answer = search(allowed_bytes)
    seconds = time.perf_counter() - start
    counts = {"steps": task.num_steps, "ooms": task.num_out_of_memory}
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"answer": answer, **counts, "seconds": seconds, "device": name}


def measure_in_fresh_process(workload: Workload, method: str, device: str, cpus: int) -> dict[str, Any]:
    """The result of :func:`measure`, or ``{"error": ...}``."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # measure this checkout, whatever is installed
    env = {**os.environ, **TAME_MALLOC, "OMP_NUM_THREADS": str(cpus), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, "--device", device, "--measure", workload.name, method]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"error": lines[-1]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def median(results: list[dict[str, Any]], key: str) -> Any:
    return statistics.median_low([result[key] for result in results])


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> list[str]:
    """Markdown, a row per model and method, medians where there are repeats."""
    lines = [
        "| model | truth | method | answer | of truth | training steps | out of memory | seconds | of ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for workload, of_method in results.items():
        truths = sorted({result["answer"] for result in of_method[TRUTH]})
        ours = median(of_method[OURS], "seconds")
        for method in METHODS:
            runs = [result for result in of_method.get(method, []) if "error" not in result]
            row = [workload, "-".join(map(str, truths)), method]
            if runs:
                answer, seconds = median(runs, "answer"), median(runs, "seconds")
                row += [str(answer), f"{answer / truths[-1]:.2f}", str(median(runs, "steps"))]
                row += [str(median(runs, "ooms")), f"{seconds:.1f}", f"{seconds / ours:.2f}"]
                lines.append("| " + " | ".join(row) + " |")
            elif method in of_method:
                lines.append("| " + " | ".join([*row, f"failed: {of_method[method][0]['error']}"] + 5 * [""]) + " |")
    return lines


def verdict(results: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The worst of our method over models and repeats; its time against the fastest peer by medians."""
    ours = [(run, of_method) for of_method in results.values() for run in of_method[OURS]]
    gaps = [abs(max(t["answer"] for t in of_method[TRUTH]) - run["answer"]) for run, of_method in ours]
    ratios = []
    for of_method in results.values():
        peers = [runs for name, runs in of_method.items() if name not in (OURS, TRUTH)]
        seconds = [median(runs, "seconds") for runs in peers if not any("error" in run for run in runs)]
        ratios.append(median(of_method[OURS], "seconds") / min(seconds))
    return {
        "max_gap_to_truth": max(gaps),
        "max_training_steps": max(run["steps"] for run, _ in ours),
        "max_ooms": max(run["ooms"] for run, _ in ours),
        "seconds_vs_best_peer": round(max(ratios), 2),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=1, help="searches per model and method; the table shows medians")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/probe_vs_peers_<device>.md")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "METHOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    workloads = {workload.name: workload.on(args.device) for workload in WORKLOADS}
    if args.measure:
        workload, method = args.measure
        print(json.dumps(measure(workloads[workload], method, args.device)))
        return

    cpus = len(os.sched_getaffinity(0))
    begin = time.perf_counter()
    skipped = [f"{m} is left out: {p} is not installed" for m, p in REQUIRES.items() if version(p) is None]
    print("\n".join(skipped) or "every peer is installed", flush=True)
    methods = [m for m in METHODS if version(REQUIRES.get(m, "torch")) is not None]
    results: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in workloads}
    for repeat in range(args.repeats):
        for shift, (name, workload) in enumerate(workloads.items(), start=repeat):
            order = methods[shift % len(methods) :] + methods[: shift % len(methods)]
            for method in [TRUTH, *order, TRUTH] if repeat == 0 else order:
                result = measure_in_fresh_process(workload, method, args.device, cpus)
                print(f"{name}: {method}: {json.dumps(result)}", flush=True)
                if "error" in result and method in (OURS, TRUTH):
                    sys.exit(f"{name}: {method} failed: {result['error']}")
                results[name].setdefault(method, []).append(result)

    last_line = json.dumps(verdict(results))
    versions = [f"Python {platform.python_version()}", *(f"{p} {version(p) or 'not installed'}" for p in PACKAGES)]
    device = results[WORKLOADS[0].name][OURS][0]["device"]
    limits = ", ".join(f"{w.name}: {w.limit_mib} MiB at {w.sequence_length} tokens" for w in workloads.values())
    report = [
        f"# Largest batch size: predict against its peers ({args.device})",
        "",
        f"    {shlex.join(['python', *sys.argv])}",
        "",
        f"- {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {(time.perf_counter() - begin) / 60:.0f} minutes",
        f"- {device}, {cpus} CPU cores; {', '.join(versions)}",
        f"- Memory beyond what rests after warm-up: {limits}",
        f"- {args.repeats} repeat(s), medians; a truth of two numbers is the noise of the limit",
        *(f"- {line}" for line in skipped),
        "",
        *table(results),
        "",
        f"`{last_line}`",
    ]
    print("\n".join(report[report.index("") :]))
    output = args.output or ROOT / "benchmarks" / "results" / f"probe_vs_peers_{args.device}.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(report) + "\n")
    print(f"written to {output}")
    print(last_line)


if __name__ == "__main__":
    main()
