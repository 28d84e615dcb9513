"""Hold what a dry run says against what others measured on real cards, and time it.

    python benchmarks/dry_run.py --libraries /tmp/libraries               # with a CUDA build of torch 2.13, and no GPU
    python benchmarks/dry_run.py --libraries /tmp/libraries --only full   # some rows alone
    python benchmarks/dry_run.py --libraries /tmp/libraries --jobs 2      # two rows at a time: about an hour on 2 cores

*Published*: programs in `published/` do what the published ones do, with the libraries of then where torch 2.13 takes
them, and `adaptive-batching dry-run` says what they take: bytes, and seconds of a step (rows and their sources are in
`published_times.py`). *Speed*: seconds until it answers for recipes of 1, 8 and 70
billion parameters. The last line printed is a JSON object.

Each row is a process of its own. What is measured is added to a file at once, and an interrupted run goes on from
there. torch has to be what the environment has; the libraries of a row go before its others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import write_report
from published_times import EXCLUDED, FITTED, HELD_OUT, TimedRow, mean_over_lengths, time_rows
from published_times import LIBRARIES as MORE_LIBRARIES

from adaptive_batching._dry_run.time.forecast import AGAINST_PUBLISHED, ONE_DEVICE

ROOT = Path(__file__).parent.parent
PROGRAMS = Path(__file__).parent / "published"
MIB, GIB = 2**20, 2**30
DRY_RUN = [sys.executable, "-m", "adaptive_batching", "dry-run", "--json"]
LONGEST = 600  # seconds of a row
# Distributions, without what they depend on: a recent environment for training has that
LIBRARIES = {
    "peft": (
        "transformers==5.13.1", "peft==0.20.0", "huggingface_hub==1.33.0", "tokenizers==0.22.2", "httpx==0.28.1",
        "httpcore==1.0.9", "torchao==0.17.0",
    ),
    "fms-mistral": (
        "transformers==4.48.1", "peft==0.13.2", "accelerate==1.0.1", "tokenizers==0.21.0", "huggingface_hub==0.26.2",
        "datasets==2.21.0", "torchao==0.17.0",
    ),
    "fms-granite": (
        "transformers==4.45.2", "peft==0.12.0", "accelerate==0.34.2", "tokenizers==0.20.3", "huggingface_hub==0.26.2",
        "datasets==2.21.0", "torchao==0.17.0",
    ),
    "torchtitan": ("torchtitan==0.1.0", "tyro<1", "docstring_parser", "typeguard", "shtab"),
    **MORE_LIBRARIES,
}  # fmt: skip
CARDS = {
    "peft": ("--gpu", "L40S"),
    "fms-mistral": ("--gpu", "A100 80GB"),
    "fms-granite": ("--gpu", "A100 80GB"),
    "torchtitan": ("--memory", "95GiB", "--capability", "9.0"),
    "torchtune": ("--gpu", "A100 80GB"),
}
# Of PEFT's comparison the longest batch is not known. 700 tokens is what `lora/rank32` takes most nearly: fixed by that
# one row, which does not count, for all the others. A short batch goes before it, whose outputs are alive meanwhile.
LONGEST_BATCH = 700
LENGTHS = ("300", "100", "0", str(LONGEST_BATCH))
FIXES_LENGTH = "lora/rank32"
FIRST_BLOCK = 2 * MIB  # that PEFT's script reserves before all else, and leaves out
WHY = {
    "prefixtuning": "what is reserved depends on the batches before the longest: 19.5 to 24.9 with three choices",
    "torchtitan": "not known; torch was a nightly build of 2024, and what was allocated is not published",
}
NOT_RUN = {
    "shira": "draws random indices, which the device does not",
    "waveft": "convolutions of cuDNN, which the device lacks",
    "frod": "prepares on the host for more than four minutes",
    "adamss": "clusters singular vectors, which are zeros",
    "torchtune 70B full and LoRA on 8 A100": "eight processes of 70 billion parameters take too long on two cores",
}
SPEED = {
    "seconds_1b": ("--gpu", "RTX 4090", "--sequence-length", "2048", "lora_finetune_single_device", "--config",
                   "llama3_2/1B_lora_single_device"),
    "seconds_8b": ("--gpu", "RTX 4090", "--sequence-length", "2048", "lora_finetune_single_device", "--config",
                   "llama3_1/8B_lora_single_device"),
    "seconds_70b_on_8": ("--gpu", "A100 80GB", "--devices", "8", "--sequence-length", "2048",
                         "lora_finetune_distributed", "--config", "llama3_1/70B_lora"),
}  # fmt: skip


PLANS = {
    "seconds_of_plan_8b": ("llama3_1/8B_lora_single_device", "--gpu", "RTX 4090", "--sequence-length", "2048"),
    "seconds_of_plan_70b_on_8": ("llama3_1/70B_lora", "--gpu", "A100 80GB", "--gpus", "8", "--sequence-length", "2048"),
}


@dataclass(frozen=True)
class Row:
    """A published figure and the program that takes as much."""

    name: str
    published_bytes: int
    counted: str
    """`allocated` or `reserved`, as in what `dry-run --json` prints."""

    source: str
    libraries: str
    program: tuple[str, ...]
    left_out_bytes: int = 0
    why: str = ""
    """What explains an error of more than 3 %, where its library does not."""


def of_peft() -> Iterator[Row]:
    for each in json.loads((PROGRAMS / "peft_results.json").read_text()):
        settings = ("--peft", json.dumps(each["peft"])) if each["peft"] else ()
        arguments = (*settings, *each.get("arguments", ()), "--lengths", *LENGTHS)
        program = ("peft_comparison.py", *arguments)
        source = "PEFT, Llama 3.2 3B, L40S"
        yield Row(each["name"], each["mib"] * MIB, "reserved", source, "peft", program, left_out_bytes=FIRST_BLOCK)


def of_fms() -> Iterator[Row]:
    published = {
        ("Mistral-7B", "LoRA", 4): 26_704_571_904, ("Mistral-7B", "LoRA", 8): 38_742_912_512,
        ("Mistral-7B", "full", 4): 72_434_837_504, ("Mistral-7B", "full", 8): 72_435_230_720,
        ("PowerLM-3b", "LoRA", 4): 20_169_870_848, ("PowerLM-3b", "LoRA", 8): 33_152_880_128,
        ("PowerLM-3b", "full", 4): 35_134_836_736, ("PowerLM-3b", "full", 8): 47_059_390_976,
    }  # fmt: skip
    for (model, method, batch_size), peak in published.items():
        libraries = "fms-mistral" if model == "Mistral-7B" else "fms-granite"
        lora = ("--lora",) if method == "LoRA" else ()
        program = ("fms_acceleration.py", "--model", model, *lora, "--batch-size", str(batch_size))
        name = f"{model} {method}, {batch_size} x 4,096"
        yield Row(name, peak, "allocated", "fms-acceleration, A100", libraries, program)


def of_torchtitan() -> Iterator[Row]:
    published = {(8, False): 82.4, (8, True): 77.0, (128, False): 67.0, (128, True): 62.0}
    for (devices, compiled), peak in published.items():
        program = ("torchtitan_llama.py", "--devices", str(devices), *(("--compile",) if compiled else ()))
        name = f"Llama 3.1 8B, FSDP2 on {devices}{', compiled' if compiled else ''}"
        yield Row(name, round(peak * GIB), "reserved", "torchtitan, H100", "torchtitan", program)


_ONE_STEP = ("gradient_accumulation_steps=1", "dataset.packed=True")
_CHUNKED = "loss._component_=torchtune.modules.loss.CEWithChunkedOutputLoss"
_AC, _NO_AC = "enable_activation_checkpointing=True", "enable_activation_checkpointing=False"
_OFFLOAD, _NO_OFFLOAD = "enable_activation_offloading=True", "enable_activation_offloading=False"
_NORM = "norms scaled in bfloat16 until torchtune 0.5, and keep a factor in float32 since"
_COPIED = "recipes of 0.1 and 0.2 copied logits, and held them during the backward pass"


def of_torchtune() -> Iterator[Row]:
    """Peaks that torchtune's README and pull requests have published, by its recipes of today."""
    tune, full, lora = "torchtune, A100", "full_finetune_single_device", "lora_finetune_single_device"
    adamw = (
        "batch_size=2",
        "dtype=bf16",
        "optimizer._component_=torch.optim.AdamW",
        "optimizer.fused=True",
        *_ONE_STEP,
    )
    whole = ("compile=True", _CHUNKED, _AC, "optimizer_in_bwd=True")
    adapters = (*adamw, "compile=True", _CHUNKED, _AC, _OFFLOAD)
    ladder: list[tuple[str, float, tuple[str, ...]]] = [
        ("full", 60.0, ("compile=False", "loss._component_=torch.nn.CrossEntropyLoss", _NO_AC, _NO_OFFLOAD)),
        ("compiled", 51.0, ("compile=True", "loss._component_=torch.nn.CrossEntropyLoss", _NO_AC, _NO_OFFLOAD)),
        ("chunked loss", 42.9, ("compile=True", _CHUNKED, _NO_AC, _NO_OFFLOAD)),
        ("checkpointed", 24.9, ("compile=True", _CHUNKED, _AC, _NO_OFFLOAD)),
        ("optimizer in the backward pass", 23.1, (*whole, _NO_OFFLOAD)),
        ("offloaded", 21.8, (*whole, _OFFLOAD)),
    ]  # fmt: skip
    rows: list[tuple[str, float, str, str, int, tuple[str, ...], str]] = [
        *(
            (f"3B, {name}", gib, full, "llama3_2/3B_full_single_device", 4096,
             (*adamw, *(() if "optimizer_in_bwd=True" in more else ("optimizer_in_bwd=False",)), *more), _NORM)
            for name, gib, more in ladder
        ),
        ("3B, 8-bit AdamW", 17.6, full, "llama3_2/3B_full_single_device", 4096,
         ("batch_size=2", "dtype=bf16", *whole, _OFFLOAD, "optimizer._component_=bitsandbytes.optim.AdamW8bit",
          *_ONE_STEP), "not explained; whose 8-bit AdamW it was is not said"),
        ("3B LoRA", 8.5, lora, "llama3_2/3B_lora_single_device", 4096, adapters, _NORM),
        ("3B QLoRA", 4.6, lora, "llama3_2/3B_qlora_single_device", 4096, adapters, "not explained"),
        ("8B full, paged 8-bit", 18.9, full, "llama3_1/8B_full_single_device", 2048,
         ("batch_size=2", *whole, _OFFLOAD, "optimizer._component_=bitsandbytes.optim.PagedAdamW8bit", *_ONE_STEP), ""),
        ("8B LoRA, checkpointed", 16.2, lora, "llama3_1/8B_lora_single_device", 2048,
         ("batch_size=2", "compile=True", "model.lora_attn_modules=[q_proj,v_proj]", "model.apply_lora_to_mlp=False",
          _AC, _OFFLOAD, *_ONE_STEP), _NORM),
        ("8B LoRA", 30.3, lora, "llama3_1/8B_lora_single_device", 2048,
         ("batch_size=2", "compile=True", "model.lora_attn_modules=[q_proj,v_proj]", "model.apply_lora_to_mlp=False",
          _NO_AC, _NO_OFFLOAD, *_ONE_STEP), _NORM),
        ("8B QLoRA", 7.4, lora, "llama3_1/8B_qlora_single_device", 2048,
         ("batch_size=2", "compile=True", "model.lora_attn_modules=[q_proj,v_proj,k_proj,output_proj]", _AC,
          _NO_OFFLOAD, *_ONE_STEP), "not explained"),
        ("Llama 2 7B full", 20.2e9 / GIB, full, "llama2/7B_full_low_memory", 2048,
         ("batch_size=4", "gradient_accumulation_steps=1", "compile=False", _AC, _NO_OFFLOAD, "optimizer_in_bwd=True",
          "loss._component_=torch.nn.CrossEntropyLoss"), _COPIED),
        ("Llama 2 7B LoRA", 21.3e9 / GIB, lora, "llama2/7B_lora_single_device", 2048,
         ("batch_size=4", "gradient_accumulation_steps=1", "compile=False", _AC, _NO_OFFLOAD,
          "model.lora_attn_modules=[q_proj,v_proj]", "model.apply_lora_to_mlp=False",
          "loss._component_=torch.nn.CrossEntropyLoss"), _COPIED),
    ]  # fmt: skip
    for name, gib, recipe, config, length, overrides, why in rows:
        program = ("--sequence-length", str(length), recipe, "--config", config, *overrides)
        yield Row(f"torchtune {name}", round(gib * GIB), "allocated", tune, "torchtune", program, why=why)


def install(libraries: str, folder: Path) -> Path:
    """Return the folder of some libraries; installs them at the first call."""
    to = folder / libraries
    if not to.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(to)]
        subprocess.run([*pip, *LIBRARIES[libraries]], check=True)
    return to


def dry_run(*arguments: str, libraries: Path | None = None) -> dict[str, Any]:
    """Return what a dry run says, and `seconds`; `failed` with a reason where it says nothing."""
    path = os.pathsep.join(str(each) for each in (libraries, ROOT) if each)
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [*DRY_RUN, *arguments], env=environment, text=True, capture_output=True, check=False, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"{LONGEST} seconds are over"}
    seconds = round(time.perf_counter() - start, 1)
    answer: dict[str, Any] = json.loads(done.stdout) if done.stdout.strip() else {}
    if answer.get("fits") is None:
        return {"failed": (done.stderr.strip().splitlines() or ["no answer"])[-1], "seconds": seconds}
    return {**{key: answer[key] for key in KEPT}, "seconds": seconds}


KEPT = ("fits", "peak_allocated_bytes", "peak_reserved_bytes", "retries", "steps", "time")
ONLY_OLD = ("convolutions",)  # of which no newer rows were found
LEAST_ROWS = 4  # of a kind, to tell how near it is


@dataclass(frozen=True)
class Run:
    """A dry run."""

    name: str
    arguments: tuple[str, ...]
    libraries: str | None


def runs_of_peaks(rows: list[Row]) -> list[Run]:
    return [
        Run(row.name, ("--no-time", *CARDS[row.libraries], *_program(row.program)),
            row.libraries if row.libraries in LIBRARIES else None)
        for row in rows
    ]  # fmt: skip


def runs_of_times(row: TimedRow) -> list[Run]:
    """Return the dry runs of a row: more than one where steps differ in length."""
    if not row.lengths:
        return [Run(row.name, (*row.options, *_program(row.program)), row.libraries)]
    options = (*row.options, "--steps", "1")
    return [
        Run(f"{row.name} at {length}", (*options, *_program((*row.program, str(length)))), row.libraries)
        for length in row.lengths
    ]


def _program(program: tuple[str, ...]) -> tuple[str, ...]:
    """Return a script's command, or that of a recipe as it is."""
    name, *arguments = program
    return ("--", sys.executable, str(PROGRAMS / name), *arguments) if name.endswith(".py") else program


def seconds_of_plan(*arguments: str) -> float:
    """Return the seconds until a plan answers."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "adaptive_batching", "plan", "--json", *arguments]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    return round(time.perf_counter() - start, 1)


def measure(runs: list[Run], folder: Path, measured: Path, jobs: int) -> dict[str, dict[str, Any]]:
    """Return what each run takes, by its name; what is in `measured` is not measured again."""
    found = {}
    if measured.exists():
        found = {each["name"]: each for each in map(json.loads, measured.read_text().splitlines())}
    missing = [run for run in runs if run.name not in found]
    for libraries in dict.fromkeys(run.libraries for run in missing if run.libraries):
        install(libraries, folder)

    def measure_one(run: Run) -> dict[str, Any]:
        libraries = None if run.libraries is None else folder / run.libraries
        return {"name": run.name, **dry_run(*run.arguments, libraries=libraries)}

    with ThreadPoolExecutor(jobs) as pool:
        for one in pool.map(measure_one, missing):
            found[one["name"]] = one
            with measured.open("a") as file:
                file.write(json.dumps(one) + "\n")
            print(one, flush=True)
    return found


def seconds_of(row: TimedRow, found: dict[str, dict[str, Any]]) -> float | None:
    """Return the seconds of a row's step as predicted; None where a dry run failed."""
    times = [found.get(run.name, {}).get("time") for run in runs_of_times(row)]
    seconds = [float(time["seconds_per_step"]) for time in times if time]
    if len(seconds) < len(times):
        return None
    return mean_over_lengths(seconds) if row.lengths else seconds[0]


def lines_of_times(predicted: dict[str, float], found: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| source | run | card | published | here | error | its peak | |", "|---|---|---|---|---|---|---|---|"]
    for row in time_rows():
        if row.name in predicted:
            kinds = {"fitted": row.name in FITTED, "held out": row.name in HELD_OUT, "older torch": row.is_old}
            why = "".join(kind for kind, applies in kinds.items() if applies)
            card = Path(row.card).stem.replace("_", " ")
            error = 100 * (predicted[row.name] / row.seconds - 1)
            peak = "-"
            if row.peak_bytes:
                peak = f"{100 * (found[row.name][f'peak_{row.peak_of}_bytes'] / row.peak_bytes - 1):+.1f} %"
            lines.append(
                f"| {row.source} | {row.name} | {card} | {row.seconds:.3f} s | {predicted[row.name]:.3f} s "
                f"| {error:+.1f} % | {peak} | {why} |"
            )
    return lines


def share_of(errors: list[float], share: float, others: int = 0) -> float:
    """Return the error that so many of them, and of so many others like them, do not exceed."""
    most = math.ceil(share * (len(errors) + others))
    return round(sorted(errors)[min(max(most, 1), len(errors)) - 1], 3)


def accuracy_by_kind(predicted: dict[str, float], found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what `AGAINST_PUBLISHED` should say of each kind of run: the rows that count, and their errors.

    The error is one that the next row, were it drawn as these were, stays within nine times in ten: it is taken from
    one row more than there are (split conformal prediction). With fewer than nine rows it is the largest there is.
    """
    errors: dict[str, list[float]] = {}
    cards: dict[str, set[str]] = {}
    for row in time_rows():
        if row.name in predicted and row.name not in (*FITTED, *HELD_OUT):
            kind = found[runs_of_times(row)[-1].name]["time"]["kind"]
            if not row.is_old or kind in ONLY_OLD:
                errors.setdefault(kind, []).append(abs(predicted[row.name] / row.seconds - 1))
                cards.setdefault(kind, set()).add(row.gpu.name)
    return {
        kind: {"rows": len(some), "nine_in_ten": share_of(some, 0.9, others=1), "cards": tuple(sorted(cards[kind]))}
        for kind, some in errors.items()
        if len(some) >= LEAST_ROWS
    }


def figures_of_times(predicted: dict[str, float]) -> dict[str, float]:
    """Return the figures of the rows that count."""
    known = [row for row in time_rows() if row.name in predicted and row.name not in FITTED]
    errors = {row.name: abs(predicted[row.name] / row.seconds - 1) for row in known}
    rows = [row for row in known if row.name not in HELD_OUT]
    counted, old = ([errors[row.name] for row in rows if row.is_old == is_old] for is_old in (False, True))
    held_out = [errors[name] for name in HELD_OUT if name in errors]
    right, pairs = 0, 0
    for one, other in itertools.combinations((row for row in rows if not row.is_old), 2):
        if one.source == other.source and max(one.seconds, other.seconds) > 1.1 * min(one.seconds, other.seconds):
            pairs += 1
            right += (one.seconds < other.seconds) == (predicted[one.name] < predicted[other.name])
    return {
        "time_rows": len(counted),
        "time_median_error": round(statistics.median(counted), 4),
        "time_p90_error": share_of(counted, 0.9),
        "time_max_error": share_of(counted, 1),
        "ranking_right": round(right / pairs, 3),
        "held_out_rows": len(held_out),
        "held_out_within": sum(error <= AGAINST_PUBLISHED[ONE_DEVICE].nine_in_ten for error in held_out),
        "time_rows_of_older_torch": len(old),
        "time_median_error_of_older_torch": round(statistics.median(old), 3),
    }


def error_of(row: Row, found: dict[str, Any]) -> float:
    here: int = found[f"peak_{row.counted}_bytes"] - row.left_out_bytes
    return here / row.published_bytes - 1


def line_of(row: Row, found: dict[str, Any]) -> str:
    error = error_of(row, found)
    why = "fixes the length" if row.name == FIXES_LENGTH else "-"
    if abs(error) > 0.03:
        why = row.why or next(
            (WHY[key] for key in WHY if key in f"{row.libraries} {row.name}".replace("/", " ").split()), "?"
        )
    here = (found[f"peak_{row.counted}_bytes"] - row.left_out_bytes) / GIB
    published = row.published_bytes / GIB
    return (
        f"| {row.source} | {row.name} | {row.counted} | {published:.2f} | {here:.2f} | {100 * error:+.2f} % | {why} |"
    )


FACTS = [
    "published and here: the most GiB of tensors allocated, or of memory that torch's allocator reserved, as published",
    "real libraries on the emulated device: `adaptive-batching dry-run`, stopped after three steps",
    "PEFT: `method_comparison/MetaMathQA/results` of huggingface/peft, an L40S in July 2026; torch 2.13.0, "
    "transformers 5.13.1 and a development version between PEFT 0.19.1 and 0.20.0, which stands in for it (`lokr`: a "
    "later one, with transformers 5.15.0)",
    f"the longest of their batches is not known. It is taken to be {LONGEST_BATCH} tokens for all rows, which is where "
    f"`{FIXES_LENGTH}` takes what was published; that row does not count. The batch before it is taken to have 100",
    "their evaluation generates text at batch 50, and is no row's peak: with 200 tokens of prompt and 300 new ones "
    "it reserves 10.2 GiB with LoRA, 12.0 with prefix tuning",
    "`full` reserves 34.6 to 36.8 GiB after steps of other lengths: gradients are allocated anew each step",
    "fms-acceleration: `scripts/benchmarks/refs/a100_80gb.csv` and `a100_80gb_granite.csv` of foundation-model-stack: "
    "rows on one A100 without kernels of its own, whose batches are full; torch 2.4.1 and flash-attn then, here torch "
    "2.13.0 and its own flash attention; transformers 4.48.1 and 4.45.2 as then",
    "torchtitan: `benchmarks/llama3_h100_202412_torchtitan.md`, a nightly build of torch of December 2024. One of 8 or "
    "128 ranks runs, in a group that sends nothing; torchtitan 0.1.0, with the norm and FSDP2's root as they were "
    "then; today's take 0.2 to 0.4 GiB less",
    "torchtune: its README of 0.2.0, 0.3.1 and 0.5.0 and pull requests 955, 961, 1664 and 2003, by recipes of 0.6.1. "
    "Settings that are not published are inferred: fused AdamW, adapters as in the configs of then, offloading",
    "times: seconds of an optimizer step, in a step more. Constants were fitted to the three rows that say so, by an "
    "earlier model of the same form; two facts were put right after the rows had been looked at: cards whose products "
    "with sums in float32 run at half rate reach their peak, and a machine's cards share what its network brings",
    "what a kernel takes in addition to its work, and how the cache's gain falls with size, were chosen by the rows of "
    "PEFT; eleven rows are held out: they were predicted for the first time after that, and do not count",
    "older torch: 1.12 to 2.1, with the libraries of then and attention by Triton; not counted, and shown",
]


def report(title: str, output: Path, facts: list[str], lines: list[str], figures: dict[str, Any]) -> None:
    packages = ("torch", "triton", "bitsandbytes")
    write_report(title, device="cpu", facts=facts, rows=lines, figures=figures, output=output, packages=packages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=Path, required=True, help="folder to install libraries of then in")
    parser.add_argument("--measured", type=Path, help="file of what is measured (default: in the folder of libraries)")
    parser.add_argument("--only", nargs="*", help="names of rows, or beginnings; written only to --output")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time (default: 1)")
    parser.add_argument("--no-speed", action="store_true", help="leave out the speed")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/dry_run_emulated.md")
    args = parser.parse_args()
    args.libraries.mkdir(parents=True, exist_ok=True)
    only = args.only
    rows = [
        row
        for row in (*of_fms(), *of_torchtitan(), *of_peft(), *of_torchtune())
        if row.name.split("/")[0] not in NOT_RUN
    ]
    rows = [row for row in rows if only is None or row.name.startswith(tuple(only))]
    timed = [row for row in time_rows() if only is None or row.name.startswith(tuple(only))]
    runs = [*runs_of_peaks(rows), *(run for row in timed for run in runs_of_times(row))]
    found = measure(runs, args.libraries, args.measured or args.libraries / "measured.jsonl", args.jobs)
    shown = [row for row in rows if "failed" not in found[row.name]]
    lines = ["| source | run | of | published | here | error | more than 3 %: why |", "|---|---|---|---|---|---|---|"]
    lines += [line_of(row, found[row.name]) for row in shown]
    seconds = {row.name: seconds_of(row, found) for row in timed}
    predicted = {name: took for name, took in seconds.items() if took is not None}
    lines += ["", *lines_of_times(predicted, found)]
    if only is not None:
        not_run = [f"not run: {run.name}, {found[run.name]['failed']}" for run in runs if "failed" in found[run.name]]
        print("\n".join([*lines, *not_run]))
        if args.output:
            report("Dry runs against some of the published peaks and times", args.output, not_run, lines, {})
        return
    errors = [abs(error_of(row, found[row.name])) for row in shown if row.name != FIXES_LENGTH]
    speed = {} if args.no_speed else SPEED
    answers = {name: dry_run(*arguments) for name, arguments in speed.items()}
    costs = [answer["seconds"] / dry_run("--no-time", *speed[name])["seconds"] for name, answer in answers.items()]
    kinds = accuracy_by_kind(predicted, found)
    figures = {
        "published_rows": len(errors),
        "median_error": round(statistics.median(errors), 4),
        "max_error": round(max(errors), 4),
        **{name: answer.get("seconds") for name, answer in answers.items()},
        **{name: seconds_of_plan(*arguments) for name, arguments in (PLANS if speed else {}).items()},
        "seconds_with_time_over_without": round(max(costs), 2) if costs else None,
        **figures_of_times(predicted),
    }
    failed = {run.name: found[run.name]["failed"] for run in runs if "failed" in found[run.name]}
    left_out = [f"not run: {name}, {why}" for name, why in {**NOT_RUN, **failed}.items()]
    left_out += [f"times not counted: {name}; {why}" for name, why in EXCLUDED.items()]
    facts = [*FACTS, *(f"{kind}: {known}" for kind, known in kinds.items()), *left_out]
    output = args.output or ROOT / "benchmarks/results/dry_run_emulated.md"
    report("Dry runs against published peaks and times", output, facts, lines, figures)
    now = {kind: asdict(replace(accuracy, measured={})) for kind, accuracy in AGAINST_PUBLISHED.items()}
    if {kind: {**known, "measured": {}} for kind, known in kinds.items()} != now:
        print(f"AGAINST_PUBLISHED is {now}; now {kinds}", file=sys.stderr)


if __name__ == "__main__":
    main()
