"""Hold planned peaks against those that torchtune's README publishes for GPUs.

    pip install -e .
    python benchmarks/published_memory.py            # about 5 minutes on 2 cores, no GPU

Each row is a run of fixed length whose settings are published, or follow from the stock config that is named; what had
to be inferred is said. The planned figure is the peak of tensors (``peak_memory_active`` in torchtune's log), as
``adaptive-batching plan`` computes it with the installed versions; the published ones were measured with versions that
are older by up to a year. Nothing is tuned to them. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from common import write_report
from omegaconf import OmegaConf
from torchtune.config._utils import _merge_yaml_and_cli_args

from adaptive_batching.torchtune.levers import CONFIGS
from adaptive_batching.torchtune.planning import Question, sketch

GIB, GB = 2**30, 10**9
_CE = "loss._component_=torch.nn.CrossEntropyLoss"
_CHUNKED = "loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
_ADAMW = ["optimizer._component_=torch.optim.AdamW", "optimizer.fused=True"]
_LADDER = [
    "batch_size=2", "gradient_accumulation_steps=1", "dtype=bf16", "dataset.packed=True", *_ADAMW,
]  # fmt: skip
_3B = "torchtune's README since 0.5.0 (pull request 2003), one A100, Llama 3.2 3B"
_8B = "torchtune's README since 0.3.1 (pull request 1664)"
_LLAMA2 = "torchtune's README of 0.2.0 (pull request 955)"


@dataclass(frozen=True)
class Row:
    """A published figure."""

    name: str
    recipe: str
    config: str
    length: int
    published_bytes: float
    source: str
    overrides: tuple[str, ...] = ()
    devices: int = 1
    inferred: str = ""
    """Settings that are not published."""

    why: str = "not explained"
    """Mechanism of an error of more than 5 %."""


def _full_3b(name: str, gib: float, *overrides: str, inferred: str = "fused AdamW", why: str = "not explained") -> Row:
    in_backward = any(each.startswith("optimizer_in_bwd=") for each in overrides)
    settings = [*_LADDER, *([] if in_backward else ["optimizer_in_bwd=False"]), *overrides]
    return Row(
        name, "full_finetune_single_device", "llama3_2/3B_full_single_device", 4096, gib * GIB, _3B, tuple(settings),
        inferred=inferred, why=why,
    )  # fmt: skip


_AC, _NO_AC = "enable_activation_checkpointing=True", "enable_activation_checkpointing=False"
_OFFLOAD, _NO_OFFLOAD = "enable_activation_offloading=True", "enable_activation_offloading=False"
_IN_BACKWARD = ("compile=True", _CHUNKED, _AC, "optimizer_in_bwd=True")
_WITH_ADAPTERS = (*_LADDER, "compile=True", _CHUNKED, _AC, _OFFLOAD)
_LOW_MEMORY = ("batch_size=4", "gradient_accumulation_steps=1", _CE, "compile=False", _NO_OFFLOAD, _AC)
ROWS = [
    _full_3b("full, packed", 60.0, "compile=False", _CE, _NO_AC, _NO_OFFLOAD),
    _full_3b("and compiled", 51.0, "compile=True", _CE, _NO_AC, _NO_OFFLOAD),
    _full_3b("and chunked cross entropy", 42.9, "compile=True", _CHUNKED, _NO_AC, _NO_OFFLOAD),
    _full_3b("and activation checkpointing", 24.9, "compile=True", _CHUNKED, _AC, _NO_OFFLOAD),
    _full_3b("and optimizer in the backward pass", 23.1, *_IN_BACKWARD, _NO_OFFLOAD),
    _full_3b("and activation offloading", 21.8, *_IN_BACKWARD, _OFFLOAD),
    _full_3b(
        "and 8-bit AdamW", 17.6, *_IN_BACKWARD, _OFFLOAD, "optimizer._component_=bitsandbytes.optim.AdamW8bit",
        inferred="whose 8-bit AdamW; bitsandbytes' taken", why="the optimizer is not named",
    ),
    Row("LoRA", "lora_finetune_single_device", "llama3_2/3B_lora_single_device", 4096, 8.5 * GIB, _3B,
        _WITH_ADAPTERS, inferred="the command of the next row"),
    Row("QLoRA", "lora_finetune_single_device", "llama3_2/3B_qlora_single_device", 4096, 4.6 * GIB, _3B,
        _WITH_ADAPTERS),
    Row("8B full, low memory, RTX 4090", "full_finetune_single_device", "llama3_1/8B_full_single_device", 2048,
        18.9 * GIB, _8B,
        ("batch_size=2", "gradient_accumulation_steps=1", "dataset.packed=True", "compile=True", _CHUNKED, _AC,
         _OFFLOAD, "optimizer_in_bwd=True", "optimizer._component_=bitsandbytes.optim.PagedAdamW8bit"),
        inferred="optimizer and offloading, from an answer in issue 2168"),
    Row("70B full, 8 A100, CPU offload", "full_finetune_distributed", "llama3_1/70B_full", 2048, 13.9 * GIB, _8B,
        ("batch_size=2", "gradient_accumulation_steps=1", "dataset.packed=True", "compile=True"), devices=8,
        inferred="all else as in the config"),
    Row("70B LoRA, 8 A100", "lora_finetune_distributed", "llama3_1/70B_lora", 2048, 27.6 * GIB, _8B,
        ("batch_size=2", "gradient_accumulation_steps=1", "dataset.packed=True", "compile=True",
            "model.lora_attn_modules=[q_proj,k_proj,v_proj]", "model.apply_lora_to_mlp=False",
            "model.lora_rank=16", "model.lora_alpha=32"), devices=8,
        inferred="adapters as in the config of 0.3.1, all else as in today's"),
    Row("Llama 2 7B full, low memory", "full_finetune_single_device", "llama2/7B_full_low_memory", 2048, 20.2 * GB,
        "torchtune pull request 961", (*_LOW_MEMORY, "optimizer_in_bwd=True"),
        why="logits were made in float32 by that version"),
    Row("Llama 2 7B LoRA, RTX 4090", "lora_finetune_single_device", "llama2/7B_lora_single_device", 2048,
        21.3 * GB, _LLAMA2, (*_LOW_MEMORY, "model.lora_attn_modules=[q_proj,v_proj]", "model.apply_lora_to_mlp=False"),
        inferred="adapters as in that version's config",
        why="logits were made in float32 by that version"),
]  # fmt: skip


def planned(row: Row) -> int:
    """Return the planned peak of tensors in bytes."""
    values = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{row.config}.yaml"), resolve=False)
    cfg = _merge_yaml_and_cli_args(Namespace(**values), list(row.overrides))  # type: ignore[arg-type]
    made = sketch(Question(row.recipe, cfg, row.devices), row.length)
    return made.forecast.need(cfg.batch_size).peak_bytes


def main() -> None:
    """Plan every row and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/published_memory_cpu.md")
    args = parser.parse_args()
    lines = [
        "| run | published | planned | error | more than 5 %: why | source | inferred |",
        "|---|---|---|---|---|---|---|",
    ]
    errors, seconds = [], {}
    for row in ROWS:
        start = time.perf_counter()
        found = planned(row)
        seconds[row.name] = time.perf_counter() - start
        errors.append(found / row.published_bytes - 1)
        lines.append(
            f"| {row.name} | {row.published_bytes / GIB:.1f} GiB | {found / GIB:.2f} GiB | {100 * errors[-1]:+.1f} % "
            f"| {row.why if abs(errors[-1]) > 0.05 else '-'} | {row.source} | {row.inferred or '-'} |"
        )
        print(lines[-1], f"{seconds[row.name]:.0f} s", flush=True)
    absolute = [abs(error) for error in errors]
    figures = {
        "rows": len(ROWS),
        "median_error": round(statistics.median(absolute), 3),
        "max_error": round(max(absolute), 3),
        "rows_within_5_percent": sum(error <= 0.05 for error in absolute),
        "seconds_8b": round(seconds["8B full, low memory, RTX 4090"], 1),
        "seconds_70b": round(max(seconds[row.name] for row in ROWS if row.devices > 1), 1),
    }
    facts = ["planned: the peak of tensors, by the installed versions; nothing is tuned to the published figures"]
    write_report(
        "Planned peaks against published ones", device="cpu", facts=facts, rows=lines, figures=figures,
        output=args.output,
    )  # fmt: skip


if __name__ == "__main__":
    main()
