"""Hold planned peaks against those that torchtune's README publishes for GPUs.

    pip install -e .[torchtune]
    python benchmarks/published_memory.py            # about 8 minutes on 2 cores, no GPU

Each row is a run of fixed length whose settings are published, or follow from the stock config that is named; what had
to be inferred is said. The planned figure is the peak of tensors (``peak_memory_active`` in torchtune's log), as
``adaptive-batching plan`` computes it with the installed versions; the published ones were measured with versions that
are older by up to two years. Where the code of then is known to have done otherwise, the run is planned a second time
with that behaviour, and the error is of that plan: see ``AS_OF``. Nothing is tuned to the figures. Each plan says how
far off these were, from ``AGAINST_PUBLISHED`` in ``plan_answer.py``. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import write_report
from omegaconf import OmegaConf
from torchtune import training
from torchtune.config._utils import _merge_yaml_and_cli_args
from torchtune.modules import RMSNorm

from adaptive_batching._torchtune.plan.plan_answer import AGAINST_PUBLISHED
from adaptive_batching._torchtune.plan.planning import CONFIGS, PlanRequest, sketch
from adaptive_batching._torchtune.stock.losses import NextToken
from adaptive_batching._torchtune.stock.objective import Sums

GIB = 2**30
GB_IN_GIB = 10**9 / GIB  # torchtune logged GB until pull request 1348
_CE = "loss._component_=torch.nn.CrossEntropyLoss"
_CHUNKED = "loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
_ADAMW = ["optimizer._component_=torch.optim.AdamW", "optimizer.fused=True"]
_LADDER = [
    "batch_size=2", "gradient_accumulation_steps=1", "dtype=bf16", "dataset.packed=True", *_ADAMW,
]  # fmt: skip
_3B = "torchtune's README since 0.5.0 (pull request 2003), one A100, Llama 3.2 3B"
_8B = "torchtune's README since 0.3.1 (pull request 1664)"
_LLAMA2 = "torchtune's README of 0.2.0 (pull request 955)"


_ROOT = "the root stays gathered after its forward"
_8_BITS = "which optimizer is not said; bitsandbytes' is planned"
_TABLE = "not explained; 24.1 GB in the same table for the run above was 20.2 GB when run again"
_VERSIONS = (
    "versions, which is not known: of November 2024, between torchtune 0.4 and 0.5, whose config had today's rank. "
    "Today's versions agree with their plan on PyTorch's allocator (plan_vs_allocator.py)"
)
_COPIED = "logits are copied, and held during the backward pass"
_NORM = "norms scale in bfloat16"


@dataclass(frozen=True)
class Row:
    """A published figure."""

    name: str
    published_gib: float
    """Peak of tensors."""

    recipe: str
    config: str
    length: int
    source: str
    overrides: tuple[str, ...] = ()
    devices: int = 1
    inferred: str = ""
    """Settings that are not published."""

    why: str = "not explained"
    """Mechanism of an error of more than 5 %."""

    as_of: str = ""
    """Difference of the code of then: a key of ``AS_OF``."""


def _full_3b(
    name: str, published_gib: float, *overrides: str, inferred: str = "fused AdamW", why: str = "not explained"
) -> Row:
    in_backward = any(each.startswith("optimizer_in_bwd=") for each in overrides)
    settings = [*_LADDER, *([] if in_backward else ["optimizer_in_bwd=False"]), *overrides]
    return Row(
        name, published_gib, "full_finetune_single_device", "llama3_2/3B_full_single_device", 4096, _3B,
        tuple(settings), inferred=inferred, why=why, as_of=_NORM,
    )  # fmt: skip


_AC, _NO_AC = "enable_activation_checkpointing=True", "enable_activation_checkpointing=False"
_OFFLOAD, _NO_OFFLOAD = "enable_activation_offloading=True", "enable_activation_offloading=False"
_IN_BACKWARD = ("compile=True", _CHUNKED, _AC, "optimizer_in_bwd=True")
_WITH_ADAPTERS = (*_LADDER, "compile=True", _CHUNKED, _AC, _OFFLOAD)
_8B_COMPILED = ("batch_size=2", "gradient_accumulation_steps=1", "dataset.packed=True", "compile=True")
_8B_LORA = (*_8B_COMPILED, "model.lora_attn_modules=[q_proj,v_proj]", "model.apply_lora_to_mlp=False")
_8B_QLORA = (*_8B_COMPILED, "model.lora_attn_modules=[q_proj,v_proj,k_proj,output_proj]")
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
        inferred="whose 8-bit AdamW; bitsandbytes' taken", why=_8_BITS,
    ),
    Row("LoRA", 8.5, "lora_finetune_single_device", "llama3_2/3B_lora_single_device", 4096, _3B,
        _WITH_ADAPTERS, inferred="the command of the next row", as_of=_NORM),
    Row("QLoRA", 4.6, "lora_finetune_single_device", "llama3_2/3B_qlora_single_device", 4096, _3B,
        _WITH_ADAPTERS, as_of=_NORM, why=_VERSIONS),
    Row("8B full, low memory, RTX 4090", 18.9, "full_finetune_single_device", "llama3_1/8B_full_single_device", 2048,
        _8B, ("batch_size=2", "gradient_accumulation_steps=1", "dataset.packed=True", "compile=True", _CHUNKED, _AC,
         _OFFLOAD, "optimizer_in_bwd=True", "optimizer._component_=bitsandbytes.optim.PagedAdamW8bit"),
        inferred="optimizer and offloading, from an answer in issue 2168"),
    Row("8B LoRA, RTX 4090", 16.2, "lora_finetune_single_device", "llama3_1/8B_lora_single_device", 2048, _8B,
        (*_8B_LORA, _AC, _OFFLOAD), inferred="offloading, as of the row above; adapters as in the config of 0.3.1",
        as_of=_NORM),
    Row("8B LoRA, RTX A6000", 30.3, "lora_finetune_single_device", "llama3_1/8B_lora_single_device", 2048, _8B,
        (*_8B_LORA, _NO_AC, _NO_OFFLOAD), inferred="no activation checkpointing; adapters as in the config of 0.3.1",
        as_of=_NORM),
    Row("8B QLoRA, RTX 4090", 7.4, "lora_finetune_single_device", "llama3_1/8B_qlora_single_device", 2048, _8B,
        (*_8B_QLORA, _AC, _NO_OFFLOAD), inferred="adapters as in the config of 0.3.1", as_of=_NORM),
    Row("70B full, 8 A100, CPU offload", 13.9, "full_finetune_distributed", "llama3_1/70B_full", 2048, _8B,
        ("batch_size=2", "gradient_accumulation_steps=1", "dataset.packed=True", "compile=True"), devices=8,
        inferred="all else as in the config"),
    Row("70B LoRA, 8 A100", 27.6, "lora_finetune_distributed", "llama3_1/70B_lora", 2048, _8B,
        ("batch_size=2", "gradient_accumulation_steps=1", "dataset.packed=True", "compile=True",
            "model.lora_attn_modules=[q_proj,k_proj,v_proj]", "model.apply_lora_to_mlp=False",
            "model.lora_rank=16", "model.lora_alpha=32"), devices=8,
        inferred="adapters as in the config of 0.3.1, all else as in today's", as_of=_ROOT),
    Row("Llama 2 7B full, low memory", 20.2 * GB_IN_GIB, "full_finetune_single_device", "llama2/7B_full_low_memory",
        2048, "torchtune pull request 961", (*_LOW_MEMORY, "optimizer_in_bwd=True"),
        as_of=_COPIED),
    Row("Llama 2 7B LoRA, RTX 4090", 21.3 * GB_IN_GIB, "lora_finetune_single_device", "llama2/7B_lora_single_device",
        2048, _LLAMA2, (*_LOW_MEMORY, "model.lora_attn_modules=[q_proj,v_proj]", "model.apply_lora_to_mlp=False"),
        inferred="adapters as in that version's config", as_of=_COPIED, why=_TABLE),
]  # fmt: skip


@contextlib.contextmanager
def _root_stays_gathered() -> Iterator[None]:
    """Have FSDP2 keep the root's parameters between forward and backward, whatever ``reshard_after_forward`` says.

    torch did so before 2.8 (pytorch/pytorch issue 131965, of a run of torchtune; changed by pull request 154704). The
    root has what is not sharded apart: here embeddings, output layer and last norm.
    """
    shard_model = training.shard_model

    def shard(model: Any, *args: Any, **kwargs: Any) -> None:
        shard_model(model, *args, **kwargs)
        model.set_reshard_after_forward(False, recurse=False)

    with mock.patch.object(training, "shard_model", shard):
        yield


@contextlib.contextmanager
def _logits_are_copied() -> Iterator[None]:
    """Shift logits instead of labels, in a copy that lives as long as the step.

    So did ``train`` in torchtune's recipes of 0.1 and 0.2: ``logits[..., :-1, :].contiguous()``, ``transpose(1, 2)``,
    and no ``del logits`` before the backward pass, which came with pull requests 1046 and 1235.
    """
    held: list[torch.Tensor] = []

    def loss(self: NextToken, model: Any, batch: Any, weight: float | None) -> tuple[torch.Tensor, Sums]:
        labels = batch.pop("labels")
        logits = model(**batch)
        held.clear()
        logits = logits[..., :-1, :].contiguous()
        labels = labels[..., 1:].contiguous()
        logits = logits.transpose(1, 2)
        held.append(logits)
        found = self._loss(logits, labels)
        return found, Sums(found.detach(), (labels != self._loss.ignore_index).sum())

    with mock.patch.object(NextToken, "loss", loss):
        yield


@contextlib.contextmanager
def _norms_scale_in_bfloat16() -> Iterator[None]:
    """Normalize in float32, and scale what has been cast back, as torchtune's norm did until 0.4.

    Since 0.5 it scales in float32, and autograd keeps the scaled factor in that type.
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale: torch.Tensor = self.scale
        return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)

    with mock.patch.object(RMSNorm, "forward", forward):
        yield


AS_OF: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    _ROOT: _root_stays_gathered,
    _COPIED: _logits_are_copied,
    _NORM: _norms_scale_in_bfloat16,
}


def planned(row: Row) -> int:
    """Return the planned peak of tensors in bytes."""
    values = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{row.config}.yaml"), resolve=False)
    cfg = _merge_yaml_and_cli_args(Namespace(**values), list(row.overrides))  # type: ignore[arg-type]
    made = sketch(PlanRequest(row.recipe, cfg, row.devices), row.length)
    return made.forecast.need(cfg.batch_size).peak_bytes


def main() -> None:
    """Plan every row and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/published_memory_cpu.md")
    parser.add_argument("--only", nargs="*", help="names of rows; nothing is written")
    args = parser.parse_args()
    lines = [
        "| run | published | planned | as of then | error | more than 5 %: why | source | inferred | otherwise then |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    errors = []
    seconds = {}
    for row in ROWS:
        if args.only and row.name not in args.only:
            continue
        start = time.perf_counter()
        today = planned(row) / GIB
        seconds[row.name] = time.perf_counter() - start
        then = today
        if row.as_of:
            with AS_OF[row.as_of]():
                then = planned(row) / GIB
        error = round(then, 2) / row.published_gib - 1
        errors.append(abs(error))
        as_of_then = f"{then:.2f} GiB" if row.as_of else "-"
        lines.append(
            f"| {row.name} | {row.published_gib:.1f} GiB | {today:.2f} GiB | {as_of_then} "
            f"| {100 * error:+.1f} % | {row.why if abs(error) > 0.05 else '-'} | {row.source} "
            f"| {row.inferred or '-'} | {row.as_of or '-'} |"
        )
        print(lines[-1], f"{seconds[row.name]:.0f} s", flush=True)
    if args.only:
        return
    half, whole = round(statistics.median(errors), 3), round(max(errors), 3)
    figures = {
        "rows": len(errors),
        "median_error": half,
        "max_error": whole,
        "rows_within_5_percent": sum(error <= 0.05 for error in errors),
        "seconds_8b": round(seconds["8B full, low memory, RTX 4090"], 1),
        "seconds_70b": round(max(seconds[row.name] for row in ROWS if row.devices > 1), 1),
    }
    facts = [
        "planned: the peak of tensors, by the installed versions; nothing is tuned to the published figures",
        "as of then: the same, with what torch or torchtune is known to have done otherwise; the error is of this one",
    ]
    write_report(
        "Planned peaks against published ones", device="cpu", facts=facts, rows=lines, figures=figures,
        output=args.output,
    )  # fmt: skip
    now = {"peaks": len(errors), "half_within": half, "all_within": whole}
    if now != AGAINST_PUBLISHED:
        print(f"AGAINST_PUBLISHED is {AGAINST_PUBLISHED}; now {now}")


if __name__ == "__main__":
    main()
