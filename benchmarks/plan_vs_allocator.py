"""Hold planned memory against what PyTorch's own caching allocator takes for the same run.

    make bench-plan                                          # in the environment of ``make test-emulated``
    python benchmarks/plan_vs_allocator.py --rows "8B full"  # some rows alone; nothing is written

Each row is one of our recipes with no field set: it loads a checkpoint of zeros, trains three steps on samples of one
length and ends. The device is emulated: torch's CUDA build, its allocator, streams, FSDP2, Inductor and Triton are
the real ones, and nothing is computed. Real are the peaks that torch counts, from the first weight on, where garbage is
collected after each step; planned is what ``adaptive-batching plan`` says. Where both differ, the plan is wrong.

What a stream does has happened at once, as the plan takes it, or with ``--late`` only when the host waits for it, so
that memory is held for other streams as long as a card can hold it.

For each card, the largest batch is sought by real runs around the planned one: it is the largest that trains without
the allocator having to empty its cache. Everything that is in use besides the allocator is taken as the plan takes it,
which is no part of this comparison.

Each run is a process of its own, forked from one that has imported everything and has not touched the device. The last
line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
GIB, MIB = 2**30, 2**20
CARDS = (24, 48, 80)
CAPABILITY = 80
STEPS = 3
_AC, _NO_AC = "enable_activation_checkpointing=True", "enable_activation_checkpointing=False"
_OFFLOAD = "enable_activation_offloading=True"
_COMPILE, _PACKED = "compile=True", "dataset.packed=True"
_ADAMW = ("optimizer._component_=torch.optim.AdamW", "optimizer.fused=null")
_PAGED = "optimizer._component_=bitsandbytes.optim.PagedAdamW8bit"
_NOT_IN_BACKWARD = "optimizer_in_bwd=False"


def on_emulated_device(*, late: bool = False) -> dict[str, str]:
    """Return the environment of a process that has emulated devices, with more memory than any run takes."""
    from adaptive_batching._emulated_device import EmulatedDevice

    card = EmulatedDevice(
        2**40, count=4, capability=divmod(CAPABILITY, 10), processors=132, largest_copy_bytes=0,
        lag=None if late else 0,
    )  # fmt: skip
    return card.environment()


@dataclass(frozen=True)
class Row:
    """A run."""

    recipe: str
    config: str
    length: int
    batch_size: int
    overrides: tuple[str, ...] = ()
    devices: int = 1
    expandable: bool = False

    @property
    def name(self) -> str:
        words = [self.config, f"{self.batch_size} x {self.length:,}"]
        if self.devices > 1:
            words.append(f"{self.devices} devices")
        words += [_spoken(each) for each in self.overrides]
        if self.expandable:
            words.append("expandable segments")
        return ", ".join(word for word in words if word)


def _spoken(override: str) -> str:
    return SPOKEN.get(override, override)


SPOKEN = {
    _AC: "checkpointing", _NO_AC: "no checkpointing", _OFFLOAD: "offloading", _COMPILE: "compiled", _PACKED: "packed",
    _PAGED: "paged 8-bit AdamW", _ADAMW[0]: "AdamW", _ADAMW[1]: "", _NOT_IN_BACKWARD: "",
    "optimizer_in_bwd=True": "optimizer in the backward pass", "gradient_accumulation_steps=2": "2 forwards",
    "gradient_accumulation_steps=4": "4 forwards",    "fsdp_cpu_offload=True": "states on the host",
}  # fmt: skip

_LORA, _FULL = "lora_finetune_single_device", "full_finetune_single_device"
_LORA_MANY, _FULL_MANY = "lora_finetune_distributed", "full_finetune_distributed"
_DPO, _DPO_MANY, _DPO_FULL = "lora_dpo_single_device", "lora_dpo_distributed", "full_dpo_distributed"
_KD, _KD_MANY = "knowledge_distillation_single_device", "knowledge_distillation_distributed"
_QAT, _QAT_LORA = "qat_distributed", "qat_lora_finetune_distributed"
_IN_BACKWARD = "optimizer_in_bwd=True"
_1B_FULL, _1B_LORA = "llama3_2/1B_full_single_device", "llama3_2/1B_lora_single_device"
_EAGER = (_NOT_IN_BACKWARD, *_ADAMW)
ROWS = [
    Row(_LORA, _1B_LORA, 2048, 2),
    Row(_LORA, _1B_LORA, 2048, 2, expandable=True),
    Row(_LORA, _1B_LORA, 2048, 4, (_AC,)),
    Row(_LORA, _1B_LORA, 2048, 4, (_AC, _OFFLOAD)),
    Row(_LORA, _1B_LORA, 2048, 2, (_COMPILE,)),
    Row(_LORA, _1B_LORA, 4096, 2, (_PACKED,)),
    Row(_LORA, _1B_LORA, 512, 8),
    Row(_LORA, _1B_LORA, 2048, 1, ("gradient_accumulation_steps=4",)),
    Row(_FULL, _1B_FULL, 2048, 2, (*_EAGER, _NO_AC)),
    Row(_FULL, _1B_FULL, 2048, 2, (*_EAGER, _NO_AC), expandable=True),
    Row(_FULL, _1B_FULL, 2048, 2, (*_EAGER, _NO_AC, "gradient_accumulation_steps=2")),
    Row(_FULL, _1B_FULL, 1024, 8, (*_EAGER, _AC, _OFFLOAD)),
    Row(_FULL, _1B_FULL, 2048, 1, (_IN_BACKWARD, *_ADAMW, _NO_AC)),
    Row(_FULL, _1B_FULL, 2048, 2, (_NOT_IN_BACKWARD, _PAGED, _NO_AC)),
    Row(_FULL, _1B_FULL, 2048, 4, (_IN_BACKWARD, _PAGED, _AC)),
    Row(_FULL, "llama3_2/3B_full_single_device", 2048, 2, (*_EAGER, _AC)),
    Row(_LORA, "llama3_2/3B_qlora_single_device", 2048, 4),
    Row(_LORA, "llama3_2/3B_qlora_single_device", 4096, 2, (_PACKED, _COMPILE, _AC, _OFFLOAD)),  # as published
    Row(_LORA, "llama3_1/8B_lora_single_device", 2048, 2),
    Row(_LORA, "llama3_1/8B_qlora_single_device", 2048, 2),
    Row(_FULL, "llama3_1/8B_full_single_device", 2048, 1, (*_EAGER, _AC)),
    Row(_LORA, "llama3/8B_dora_single_device", 1024, 2),
    Row(_LORA, "llama3/8B_qdora_single_device", 1024, 2),
    Row(_FULL, "qwen2_5/0.5B_full_single_device", 1024, 4, (*_EAGER, _COMPILE)),
    Row(_FULL, "qwen2_5/1.5B_full_single_device", 1024, 2, (*_EAGER, _NO_AC)),
    Row(_LORA, "qwen2_5/3B_lora_single_device", 2048, 2),
    Row(_LORA, "gemma2/2B_lora_single_device", 1024, 2),
    Row(_LORA, "mistral/7B_lora_single_device", 2048, 2),
    Row(_LORA, "phi3/mini_lora_single_device", 2048, 2),
    Row(_DPO, "llama3_1/8B_lora_dpo_single_device", 1024, 2),
    Row(_KD, "llama3_2/8B_to_1B_KD_lora_single_device", 1024, 2),
    Row(_FULL_MANY, "llama3_2/1B_full", 2048, 2, devices=2),
    Row(_FULL_MANY, "llama3_2/1B_full", 2048, 2, (_AC,), devices=2),
    Row(_FULL_MANY, "llama3_2/1B_full", 2048, 2, devices=2, expandable=True),
    Row(_FULL_MANY, "llama3_2/1B_full", 2048, 1, (_IN_BACKWARD,), devices=2),
    Row(_FULL_MANY, "llama3_1/8B_full", 2048, 1, (_AC,), devices=4),
    Row(_FULL_MANY, "llama3_2/1B_full", 2048, 2, ("fsdp_cpu_offload=True", _AC), devices=2),
    Row(_LORA_MANY, "llama3_2/3B_lora", 2048, 2, devices=2),
    Row(_LORA_MANY, "llama3_1/8B_lora", 2048, 2, (_AC,), devices=2),
    Row(_LORA_MANY, "qwen2_5/7B_lora", 1024, 4, devices=4),
    Row(_DPO_MANY, "llama3_1/8B_lora_dpo", 1024, 1, devices=2),
    Row(_DPO_FULL, "llama3_1/8B_full_dpo", 512, 1, devices=4),
    Row(_KD_MANY, "llama3_2/8B_to_1B_KD_lora_distributed", 1024, 2, devices=2),
    Row(_QAT, "llama3/8B_qat_full", 1024, 1, devices=4),
    Row(_QAT_LORA, "llama3_2/1B_qat_lora", 1024, 2, devices=2),
]


def config_of(row: Row, batch_size: int, folder: Path) -> Any:
    """Return the config of a run that trains a few steps on samples of one length."""
    from omegaconf import OmegaConf
    from torchtune.config._utils import _merge_yaml_and_cli_args

    from adaptive_batching._torchtune.plan.planning import CONFIGS

    values: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{row.config}.yaml"), resolve=False)
    overrides = (f"output_dir={folder}", "gradient_accumulation_steps=1", f"batch_size={batch_size}", *row.overrides)
    return _merge_yaml_and_cli_args(Namespace(**values), list(overrides))


def plan(row: Row, folder: Path) -> dict[str, Any]:
    """Return what is planned of a run, and the largest batch for each card."""
    from adaptive_batching._torchtune.plan.planning import PlanRequest, sketch

    made = sketch(PlanRequest(row.recipe, config_of(row, row.batch_size, folder), row.devices), row.length)
    need = made.forecast.need(row.batch_size)
    reserved = need.reserved.expandable if row.expandable else need.reserved.by_default
    outside = sum(each.most for each in made.forecast.outside)
    return {
        "allocated": need.peak_bytes if row.expandable else need.reserved.allocated,
        "reserved": reserved,
        "outside": outside,
        "largest": {card: made.forecast.largest(card * GIB) for card in CARDS},
    }  # fmt: skip


def train(row: Row, batch_size: int, rank: int, port: int, folder: Path) -> dict[str, Any]:
    """Run the recipe as its command does, and return the peaks that torch has counted."""
    import torch
    from omegaconf import OmegaConf

    from adaptive_batching._torchtune.cli.dry_run import load_zeros, stand_in

    if row.devices > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(row.devices), LOCAL_WORLD_SIZE=str(row.devices),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    if row.expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    cfg = config_of(row, batch_size, folder / f"out_{rank}")
    OmegaConf.set_struct(cfg, False)
    samples = STEPS * batch_size * row.devices * cfg.gradient_accumulation_steps
    stand_in(cfg, row.recipe, row.length, folder / f"rank_{rank}", samples)
    cfg.update(epochs=1, max_steps_per_epoch=STEPS, seed=0, log_peak_memory_stats=False)
    load_zeros(cfg, folder / re.sub(r"\W", "_", json.dumps(OmegaConf.to_container(cfg.model)))[:150])
    recipe = _load(row.recipe)
    _save_nothing(recipe)
    peaks = _Peaks()
    file = folder / f"config_{rank}.yaml"
    OmegaConf.save(cfg, file)
    sys.argv = [row.recipe, "--config", str(file)]
    with peaks:
        try:
            recipe.recipe_main()
        except SystemExit as end:
            if end.code:
                raise
    return peaks.found


class _Peaks(contextlib.AbstractContextManager[None]):
    """Keeps the most that torch counts as allocated and reserved, also where someone resets its counters."""

    def __init__(self) -> None:
        self.found = {"allocated": 0, "reserved": 0, "retries": 0}

    def __enter__(self) -> None:
        import torch
        from torchtune.training.metric_logging import DiskLogger

        self._reset = torch.cuda.memory.reset_peak_memory_stats

        def reset(device: Any = None) -> None:
            self._note()
            self._reset(device)

        torch.cuda.memory.reset_peak_memory_stats = torch.cuda.reset_peak_memory_stats = reset
        log_step = DiskLogger.log_dict

        def log(self: DiskLogger, *payload: Any, **named: Any) -> None:
            gc.collect()  # compilers leave tensors behind in circles, which Python frees when it comes to them
            log_step(self, *payload, **named)

        DiskLogger.log_dict = log

    def __exit__(self, *error: object) -> None:
        self._note()

    def _note(self) -> None:
        import torch

        self.found["allocated"] = max(self.found["allocated"], torch.cuda.max_memory_allocated())
        self.found["reserved"] = max(self.found["reserved"], torch.cuda.max_memory_reserved())
        self.found["retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)


def _load(recipe: str) -> Any:
    import importlib

    return importlib.import_module(f"recipes.{recipe}")


def _save_nothing(module: Any) -> None:
    recipe: Any
    [recipe] = [value for value in vars(module).values() if isinstance(value, type)]
    recipe.save_checkpoint = lambda self, *args, **kwargs: None


def in_fork(
    function: Callable[..., dict[str, Any]], calls: list[tuple[Any, ...]], quiet: bool = True
) -> dict[str, Any]:
    """Call ``function`` in processes of their own at once, and return what the first of them does."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in calls]

    def run(pipe: Any, arguments: tuple[Any, ...]) -> None:
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            found = function(*arguments)
        except BaseException as error:
            found = {"failed": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
        pipe.send(found)
        pipe.close()
        os._exit(0)

    children = [
        context.Process(target=run, args=(pipe[1], arguments)) for pipe, arguments in zip(pipes, calls, strict=True)
    ]
    for child in children:
        child.start()
    for _, end in pipes:
        end.close()
    try:
        while not pipes[0][0].poll(1):
            if any(child.exitcode for child in children):  # the others would wait for it
                raise EOFError
        return pipes[0][0].recv()  # type: ignore[no-any-return]
    except EOFError:
        return {"failed": "the process has died", "where": ""}
    finally:
        for child in children:
            child.join(60)
            child.kill()


def measure(row: Row, batch_size: int, folder: Path, quiet: bool) -> dict[str, Any]:
    """Train at a batch size."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return in_fork(train, [(row, batch_size, rank, port, folder) for rank in range(row.devices)], quiet)


class NotMeasuredError(RuntimeError):
    """A run has ended early: here, where the device has memory enough, for want of the host's."""


def largest(row: Row, planned: int, budget: int, peaks: dict[int, int], folder: Path) -> int | None:
    """Return the largest batch that trains within ``budget`` bytes reserved, sought around the planned one."""

    def fits(batch_size: int) -> bool:
        if batch_size not in peaks:
            found = measure(row, batch_size, folder, quiet=True)
            if "failed" in found:
                raise NotMeasuredError
            peaks[batch_size] = int(found["reserved"])
        return peaks[batch_size] <= budget

    size = planned
    try:
        while size and not fits(size):
            size -= 1
        while size >= planned and fits(size + 1):
            size += 1
    except NotMeasuredError:
        return None
    return size


def import_all() -> None:
    """Import what runs need, and leave the device alone: once asked for, CUDA does not go along into a fork."""
    import torch
    from torch._inductor import config
    from torch.utils._triton import has_triton

    with (
        config.patch(triton_disable_device_detection=True),
        mock.patch.object(torch._C, "_cuda_getDeviceCount", lambda: 1),  # torchtune looks whether it is there
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: divmod(CAPABILITY, 10)),
    ):
        import torchtune  # noqa: F401

        import adaptive_batching._torchtune.plan.planning
        import adaptive_batching.torchtune  # noqa: F401
    has_triton.cache_clear()
    os.cpu_count = lambda: 8  # which torchtune divides by the number of devices, to none on a small machine


def hold(row: Row, folder: Path, *, seeks: bool, quiet: bool) -> dict[str, Any]:
    """Return what is planned of a run and what it takes, and the largest batches that both give for each card."""
    planned = in_fork(plan, [(row, folder)], quiet)
    real = measure(row, row.batch_size, folder, quiet)
    for found in (planned, real):
        if "failed" in found:
            return {"failed": found["failed"], "where": found["where"]}
    sizes: dict[int, tuple[int, int | None]] = {}
    if seeks and not row.expandable:  # the plan answers for default settings
        peaks = {row.batch_size: real["reserved"]}
        for card in CARDS:
            said = planned["largest"][card]
            sizes[card] = said, largest(row, said, card * GIB - planned["outside"], peaks, folder)
    return {"planned": planned, "real": real, "sizes": sizes}


def error_of(found: dict[str, Any], what: str) -> float:
    """Return the share of the real figure by which the planned one is larger."""
    return float(found["planned"][what] / found["real"][what] - 1)


def line_of(row: Row, found: dict[str, Any]) -> str:
    """Return a row of the table."""
    cells = [row.recipe, row.name]
    if "failed" in found:
        return "| " + " | ".join([*cells, "failed", found["failed"][:200].replace("|", "/")]) + " |"
    for what in ("allocated", "reserved"):
        cells += [f"{found['real'][what] / GIB:.2f} GiB", f"{100 * error_of(found, what):+.2f} %"]
    for card in CARDS:
        said, real = found["sizes"].get(card, (None, None))
        cells.append("-" if real is None else str(said) if said == real else f"{said} (real {real})")
    return "| " + " | ".join(cells) + " |"


def figures_of(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result in numbers."""
    sizes = [pair for found in measured for pair in found["sizes"].values() if pair[1] is not None]
    return {
        "rows": len(measured),
        "max_allocated_error": round(max((abs(error_of(found, "allocated")) for found in measured), default=0), 4),
        "max_reserved_error": round(max((abs(error_of(found, "reserved")) for found in measured), default=0), 4),
        "largest_batch_equal": round(sum(a == b for a, b in sizes) / len(sizes), 3) if sizes else None,
    }


def main() -> None:
    """Run every row and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="a pattern; only the rows that it matches, written with --output alone")
    parser.add_argument("--peaks-only", action="store_true", help="do not seek the largest batches")
    parser.add_argument("--late", action="store_true", help="what streams do has happened when the host waits for it")
    parser.add_argument("--show", action="store_true", help="what the recipes print, and where they fail")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/plan_vs_allocator_emulated.md")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    if "EMULATED_DEVICE_MEMORY" not in os.environ:
        sys.exit(
            subprocess.run([sys.executable, *sys.argv], env=on_emulated_device(late=args.late), check=False).returncode
        )
    import_all()
    head = ["recipe", "run", "allocated", "planned", "reserved", "planned", *(f"{card} GB" for card in CARDS)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            if args.rows and not re.search(args.rows, f"{row.recipe} {row.name}"):
                continue
            found = hold(row, Path(folder), seeks=not args.peaks_only, quiet=not args.show)
            lines.append(line_of(row, found))
            print(lines[-1], flush=True)
            if "failed" not in found:
                measured.append(found)
            elif args.show:
                print(found["where"], flush=True)
    if args.rows and not args.output:
        print(json.dumps(figures_of(measured)))
        return
    in_fork(write_result, [(lines, figures_of(measured), args.output, args.late)], quiet=False)


def write_result(lines: list[str], figures: dict[str, Any], output: Path | None, late: bool) -> dict[str, Any]:
    """Write the result file; in a process of its own, as it asks for the device."""
    from common import write_report

    facts = [
        "emulated device: real allocator, no arithmetic; 132 multiprocessors of compute capability 8.0",
        "planned: error of the plan, above the real figure or below it; each run is three steps",
        "the last columns: largest batch for a card of so many GiB, planned, and the real one where it is another",
        "PPO is no row: `plan` cannot tell, as no two of its steps are alike",
    ]
    if late:
        facts.insert(1, "what a stream does has happened when the host waits for it, and no earlier")
    packages = ("torch", "torchtune", "torchao", "bitsandbytes", "triton")
    write_report(
        "Planned memory against PyTorch's allocator", device="emulated", facts=facts, rows=lines, figures=figures,
        output=output, packages=packages,
    )  # fmt: skip
    return {}


if __name__ == "__main__":
    main()
