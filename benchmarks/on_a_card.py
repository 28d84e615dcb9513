"""Hold what a dry run says of training against a card that is here: seconds of a step, and peaks of memory.

    python benchmarks/on_a_card.py --forecast forecast.json --gpu H100   # needs no GPU, but a CUDA build of torch
    python benchmarks/on_a_card.py --measure measured.json               # on the card; 3 minutes
    python benchmarks/on_a_card.py --compare forecast.json measured.json # writes benchmarks/results/on_a_card_<card>.md

The first runs `adaptive-batching dry-run` for each of `ROWS`, the second trains the same. Neither knows of the other;
two constants of a forecast were fitted to the two rows in `FITTED`, after forecasts without them had been written down
(`on_a_card_forecast_before.json`). Models come from configs of published ones, with weights
and tokens that are drawn; on the card each has a process of its own, which takes some steps, then times three runs of
steps, with one wait for the device at the end of each, and lists the kernels of one more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import write_report

sys.modules["torchao"] = None  # type: ignore[assignment]  # PEFT refuses the release that torchtune takes

WARM_UP_STEPS, STEPS_OF_A_DRY_RUN = 4, 5
FITTED = ("Llama 1B, 8 x 2048", "GPT-2, autocast, 16 x 1024")  # to which two constants of the forecast of times were
SECONDS_OF_A_ROW = 2.0
MOST_OF_A_STEP = 0.85  # share of it below which kernels leave the card waiting for the host
ROOT = Path(__file__).parent.parent
LLAMA_1B = dict(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    head_dim=64, vocab_size=128256, tie_word_embeddings=True, max_position_embeddings=32768,
)  # fmt: skip
LLAMA_3B = {**LLAMA_1B, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}
LLAMA_8B = {
    **LLAMA_1B, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN_HALF_B = dict(
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = dict(
    hidden_size=1024, intermediate_size=3072, moe_intermediate_size=512, num_hidden_layers=12, num_attention_heads=16,
    num_key_value_heads=4, head_dim=64, num_experts=32, num_experts_per_tok=4, vocab_size=32000,
)  # fmt: skip
T5_BASE = dict(d_model=768, d_ff=3072, d_kv=64, num_layers=12, num_heads=12, decoder_start_token_id=0)
GEMMA_2B: dict[str, Any] = {}  # the default of Gemma2Config
ATTENTION_AND_MLP = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Row:
    """What is trained."""

    config: str
    """A class of configs of transformers, or `resnet50` of torchvision."""

    settings: dict[str, Any]
    batch_size: int
    length: int = 0
    head: str = "AutoModelForCausalLM"
    dtype: torch.dtype = torch.bfloat16
    """Of the weights."""

    autocast: torch.dtype | None = None
    lora: int = 0
    """The rank of the adapters, 0 if the whole model is trained."""

    checkpointing: bool = False
    compiled: bool = False
    attention: str = "sdpa"
    optimizer: str = "AdamW"
    fused: bool = True


HALF: dict[str, Any] = dict(dtype=torch.float32, autocast=torch.bfloat16)
ROWS: dict[str, Row] = {
    "Llama 1B, 8 x 2048": Row("LlamaConfig", LLAMA_1B, 8, 2048),
    "Llama 1B, checkpointing, 16 x 2048": Row("LlamaConfig", LLAMA_1B, 16, 2048, checkpointing=True),
    "Llama 1B, checkpointing, 1 x 16384": Row("LlamaConfig", LLAMA_1B, 1, 16384, checkpointing=True),
    "Llama 1B, 1 x 512": Row("LlamaConfig", LLAMA_1B, 1, 512),
    "Llama 3B, checkpointing, 4 x 2048": Row("LlamaConfig", LLAMA_3B, 4, 2048, checkpointing=True),
    "Llama 8B, LoRA, checkpointing, 4 x 2048": Row("LlamaConfig", LLAMA_8B, 4, 2048, lora=16, checkpointing=True),
    "Llama 8B, LoRA, 2 x 1024": Row("LlamaConfig", LLAMA_8B, 2, 1024, lora=16),
    "Llama 8B, SGD, checkpointing, 2 x 2048": Row(
        "LlamaConfig", LLAMA_8B, 2, 2048, checkpointing=True, optimizer="SGD", fused=False
    ),
    "Qwen2.5 0.5B, 8 x 1024": Row("Qwen2Config", QWEN_HALF_B, 8, 1024),
    "Qwen2.5 0.5B, autocast, AdamW foreach, 8 x 512": Row("Qwen2Config", QWEN_HALF_B, 8, 512, fused=False, **HALF),
    "Gemma 2 2B, eager attention, 2 x 1024": Row("Gemma2Config", GEMMA_2B, 2, 1024, attention="eager"),
    "Qwen3 with 32 experts, 4 x 1024": Row("Qwen3MoeConfig", EXPERTS, 4, 1024),
    "GPT-2, autocast, 16 x 1024": Row("GPT2Config", {}, 16, 1024, **HALF),
    "GPT-2, float32, 8 x 512": Row("GPT2Config", {}, 8, 512, dtype=torch.float32),
    "BERT base, autocast, 32 x 128": Row("BertConfig", {}, 32, 128, "AutoModelForSequenceClassification", **HALF),
    "T5 base, 16 x 512": Row("T5Config", T5_BASE, 16, 512, "AutoModelForSeq2SeqLM", attention="eager"),
    "ViT base, autocast, 128 images": Row("ViTConfig", {}, 128, 0, "AutoModelForImageClassification", **HALF),
    "ResNet-50, autocast, 256 images": Row("resnet50", {}, 256, optimizer="SGD", fused=False, **HALF),
    "GPT-2, autocast, compiled, 16 x 1024": Row("GPT2Config", {}, 16, 1024, compiled=True, **HALF),
    "Llama 1B, compiled, 8 x 2048": Row("LlamaConfig", LLAMA_1B, 8, 2048, compiled=True),
}


def make_model(row: Row) -> Any:
    if row.config == "resnet50":
        import torchvision  # type: ignore[import-not-found,unused-ignore]

        with torch.device("cuda"):
            return torchvision.models.resnet50().to(memory_format=torch.channels_last)
    import transformers

    config = getattr(transformers, row.config)(**row.settings)
    config.use_cache = False
    with torch.device("cuda"):
        model = getattr(transformers, row.head).from_config(config, dtype=row.dtype, attn_implementation=row.attention)
    if row.lora:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=row.lora, target_modules=ATTENTION_AND_MLP, task_type="CAUSAL_LM"))
    if row.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_batch(row: Row) -> dict[str, torch.Tensor]:
    """Draw inputs of full length: tokens [b, s], or images [b, 3, 224, 224] and their classes."""
    torch.manual_seed(0)
    if not row.length:
        images = torch.randn(row.batch_size, 3, 224, 224, device="cuda")
        if row.config == "resnet50":
            images = images.contiguous(memory_format=torch.channels_last)
        return {"pixel_values": images, "labels": torch.zeros(row.batch_size, dtype=torch.long, device="cuda")}
    tokens = torch.randint(100, 20000, (row.batch_size, row.length), device="cuda")
    per_sample = row.head == "AutoModelForSequenceClassification"
    return {"input_ids": tokens, "labels": torch.zeros_like(tokens[:, 0]) if per_sample else tokens}


def make_step(row: Row) -> Callable[[], None]:
    model, batch = make_model(row), make_batch(row)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = getattr(torch.optim, row.optimizer)(trained, lr=1e-5, fused=row.fused or None)
    loss_of = torch.nn.CrossEntropyLoss()
    runs = torch.compile(model) if row.compiled else model

    def step() -> None:
        with torch.autocast("cuda", row.autocast, enabled=row.autocast is not None):
            if row.config == "resnet50":
                loss = loss_of(runs(batch["pixel_values"]), batch["labels"])
            else:
                loss = runs(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], object], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def kernels_of(step: Callable[[], None]) -> list[tuple[str, int, float]]:
    """Return name, number and microseconds of the kernels of a step, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in profile.events() or []:
        name = event.name[:160]
        found[name] += 1
        microseconds[name] += event.device_time_total
    return [(name, found[name], round(took, 1)) for name, took in microseconds.most_common()]


def measure_row(row: Row) -> dict[str, Any]:
    """Train in this process, which has done nothing else."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    begun = time.perf_counter()
    step = make_step(row)
    resting = torch.cuda.memory_allocated()
    for _ in range(WARM_UP_STEPS):
        step()
    once = timed(step, 1)
    steps = max(2, min(20, round(SECONDS_OF_A_ROW / 3 / once)))
    took = [timed(step, steps) for _ in range(3)]
    free, total = torch.cuda.mem_get_info()
    found = {
        "seconds": statistics.median(took), "all_seconds": took, "steps": steps,
        "allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_bytes": total - free, "weights_bytes": resting,
    }  # fmt: skip
    try:
        found["kernels"] = kernels_of(step)
    except Exception as error:  # of a profiler that is not allowed here
        found["kernels_error"] = repr(error)[:300]
    return {**found, "whole_seconds": time.perf_counter() - begun}


def of_the_card() -> dict[str, Any]:
    """Measure the card itself: products, copies, launches."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    properties = torch.cuda.get_device_properties(0)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    big = torch.empty(2**31, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(big)
    small = torch.zeros(16, device="cuda")

    def launch() -> None:
        for _ in range(1000):
            small.add_(1)

    found: dict[str, Any] = {"name": properties.name, "total_memory": properties.total_memory,
                             "processors": properties.multi_processor_count, "torch": torch.__version__}  # fmt: skip
    for name, run in [("product", lambda: a @ b), ("copy", lambda: target.copy_(big)), ("launch", launch)]:
        timed(run, 3)
        found[name] = min(timed(run, 10) for _ in range(3))
    found["product_tflops"] = 2 * 8192**3 / found["product"] / 1e12
    found["copy_tb_per_second"] = 2 * 2**31 / found["copy"] / 1e12
    found["microseconds_of_a_launch"] = found["launch"] * 1000
    found["made_with"] = (
        f"torch {torch.__version__}, Python {platform.python_version()}, on {properties.name}; it multiplies "
        f"{found['product_tflops']:.0f} teraflops in bfloat16, and copies {found['copy_tb_per_second']:.2f} terabytes "
        "a second"
    )
    return found


def _in_child(name: str, answers: Any) -> None:
    try:
        answers.put(of_the_card() if name == "card" else measure_row(ROWS[name]))
    except BaseException:
        answers.put({"error": traceback.format_exc()[-1500:]})


def measure(output: Path, only: list[str], seconds: float) -> None:
    """Train each row on the card that is here, in a forked process, which need not import again."""
    import peft  # noqa: F401
    import torchvision  # noqa: F401
    import transformers
    from transformers import models  # noqa: F401

    for row in ROWS.values():  # imported before the first fork
        if row.config != "resnet50":
            getattr(transformers, row.config)
    forks = multiprocessing.get_context("fork")
    measured: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    for name in ["card", *only]:
        left = min(deadline - time.monotonic(), 75)
        if left < 5:
            measured[name] = {"error": "time is up"}
            continue
        answers: Any = forks.Queue()
        child = forks.Process(target=_in_child, args=(name, answers))
        child.start()
        try:
            measured[name] = answers.get(timeout=left)
        except Exception:
            measured[name] = {"error": f"stopped after {left:.0f} s"}
            child.kill()
        child.join(10)
        if child.is_alive():
            child.kill()
        output.write_text(json.dumps(compact(measured), indent=1))
        shown = {key: value for key, value in measured[name].items() if key != "kernels"}
        print(name, shown, flush=True)


def forecast(output: Path, only: list[str], gpus: list[str]) -> None:
    """Ask a dry run for each row."""
    known: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    for name in only:
        if name in known and "error" not in known[name]:
            continue
        cards = [part for gpu in gpus for part in ("--gpu", gpu)]
        command = [sys.executable, "-m", "adaptive_batching", "dry-run", "--json", *cards, "--",
                   sys.executable, __file__, "--row", name]  # fmt: skip
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            answer = json.loads(done.stdout)
        except json.JSONDecodeError:
            known[name] = {"error": (done.stdout + done.stderr)[-1500:]}
        else:
            known[name] = {run["card"]: of_answer(run) for run in answer.get("runs", [answer])}
        output.write_text(json.dumps(known, indent=1))
        print(name, known[name], f"{time.monotonic() - started:.0f} s", flush=True)


OF_TIME = ("seconds_per_step", "seconds_low", "seconds_high", "seconds_on_slow_host", "kind", "limits")


def of_answer(run: dict[str, Any]) -> dict[str, Any]:
    """Return what is compared of what a dry run says of one card."""
    told = run["time"] or {}
    return {
        **{key: told.get(key) for key in OF_TIME},
        "allocated_bytes": run["peak_allocated_bytes"], "reserved_bytes": run["peak_reserved_bytes"],
    }  # fmt: skip


def kind_of_kernel(name: str) -> str:
    """Return what a kernel does, by its name."""
    name = name.lower()
    if re.search("flash|fmha|sdpa", name):
        return "attention"
    if re.search("gemm|nvjet|cutlass|xmma|gemv|splitk", name):
        return "products"
    return "memory"


FACTS = [
    f"fitted on an H200 to: {', '.join(FITTED)}; nothing else of a forecast was chosen by what is here",
    "slow host: the step where an operation takes the host 33 us, as on that H200, and not 10",
    "kernels: seconds of the step's kernels, which are less where the card waits for the host",
    "memory: forecast by torch 2.13, whatever was measured with",
]


def compact(measured: dict[str, Any]) -> dict[str, Any]:
    """Return measurements with the kernels of a row added up by kind, as (number, seconds)."""
    rows: dict[str, Any] = {}
    for name, row in measured.items():
        kinds: dict[str, list[float]] = {}
        for kernel, number, microseconds in row.get("kernels", []):
            of_kind = kinds.setdefault(kind_of_kernel(kernel), [0, 0.0])
            of_kind[0] += number
            of_kind[1] = round(of_kind[1] + microseconds / 1e6, 6)
        rows[name] = {**{key: value for key, value in row.items() if key != "kernels"}, "kernels": kinds}
    return rows


def compare(forecasts: Path, measurements: Path) -> None:
    """Write how far forecasts are from measurements."""
    foretold, measured = json.loads(forecasts.read_text()), json.loads(measurements.read_text())
    found = measured.pop("card")
    card = next(name for name in foretold[next(iter(foretold))] if name in found["name"].split())
    rows = [
        "| | seconds | forecast | off | within | kernels alone | peak, MiB | forecast off by | reserved, MiB | off |"
    ]
    rows.append("|---" * 10 + "|")
    errors: dict[str, list[float]] = {"limited by the card": [], "limited by the host": []}
    off_in_memory: dict[str, list[float]] = {"allocated": [], "reserved": []}
    within = []
    for name, row in measured.items():
        if "seconds" not in row:
            continue
        told = foretold[name][card]
        error = told["seconds_per_step"] / row["seconds"] - 1
        is_within = told["seconds_low"] <= row["seconds"] <= told["seconds_high"] if told["seconds_low"] else None
        of_kernels = sum(seconds for _, seconds in row["kernels"].values())
        waits = bool(of_kernels) and of_kernels < MOST_OF_A_STEP * row["seconds"]
        if name not in FITTED:
            errors["limited by the host" if waits else "limited by the card"].append(abs(error))
            within += [] if waits or is_within is None else [is_within]
        shown = ["-", "-", "-", "-"]
        for at, what in enumerate(("allocated", "reserved")):
            if (bytes_of := row.get(f"{what}_bytes")) is not None:
                apart = told[f"{what}_bytes"] / bytes_of - 1
                off_in_memory[what].append(abs(apart))
                shown[2 * at : 2 * at + 2] = [f"{bytes_of / 2**20:,.0f}", f"{100 * apart:+.3f} %"]
        words = {True: "within", False: "not within", None: "none"}[is_within]
        slow = told.get("seconds_on_slow_host")
        kernels = f"{of_kernels:.4f}" if of_kernels else "-"
        first = f"| {name} | {row['seconds']:.4f} | {told['seconds_per_step']:.4f} | {100 * error:+.1f} % | {words} "
        rows.append(f"{first}| {f'{slow:.4f}' if slow else '-'} | {kernels} | {' | '.join(shown)} |")
    figures: dict[str, Any] = {}
    for kind, shares in {**errors, **off_in_memory}.items():
        if shares:
            figures |= {f"{kind}: median error": round(statistics.median(shares), 5), f"largest, {kind}": max(shares)}
    figures["within the interval"] = f"{sum(within)} of {len(within)}"
    write_report(
        "On a card: seconds and memory of programs, against what a dry run says",
        device="cuda", facts=[f"measured with {found['made_with']}", *found.get("notes", []), *FACTS], rows=rows,
        figures=figures, output=ROOT / f"benchmarks/results/on_a_card_{card.lower()}.md", packages=("torch",),
        device_name="forecasts without a GPU",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=ROWS)
    parser.add_argument("--forecast", type=Path)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("FORECAST", "MEASURED"))
    parser.add_argument("--gpu", action="append", default=[])
    parser.add_argument("--only", default="", help="rows in whose name this expression is found")
    parser.add_argument("--seconds", type=float, default=240, help="nothing is begun or goes on after this long")
    args = parser.parse_args()
    only = [name for name in ROWS if re.search(args.only, name)]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.row:
        step = make_step(ROWS[args.row])
        for _ in range(STEPS_OF_A_DRY_RUN):
            step()
        torch.cuda.synchronize()
    if args.forecast:
        forecast(args.forecast, only, args.gpu or ["H100"])
    if args.measure:
        measure(args.measure, only, args.seconds)
    if args.compare:
        compare(*args.compare)


if __name__ == "__main__":
    main()
