"""One epoch over the quickstart's data, the same 64 samples in each optimizer step, cut into forwards in three ways.

    pip install -e .
    python benchmarks/epoch_time.py                  # about 10 minutes on 2 cores
    python benchmarks/epoch_time.py --device cuda --repeats 3

Samples are cut only at the 512 tokens that the model takes.

- stock, ``batch_size=64``: one forward for each step;
- stock, ``batch_size=4 gradient_accumulation_steps=16``: sixteen forwards of the samples as they come;
- ours, ``batch_size=64 micro_batch_size=auto``: sorted by length, cut at the least measured cost.

Each run is a fresh process; the ways alternate. Only ``recipe.train()`` is timed, its checkpoint included; the probe of
``auto`` runs before and is reported beside it. The last line printed is a JSON object: ratios of medians, the largest
relative difference of a step's loss to the first way's, and padded over real tokens of ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import measure_in_fresh_process, write_report
from omegaconf import OmegaConf

from adaptive_batching.memory import memory_meter
from adaptive_batching.torchtune import AdaptiveBatching, load_stock
from adaptive_batching.torchtune.quickstart import build

ROOT = Path(__file__).parent.parent
OURS = "ours, micro_batch_size=auto"
WAYS: dict[str, dict[str, Any]] = {
    "stock, batch_size=64": {"batch_size": 64, "gradient_accumulation_steps": 1},
    "stock, 4 x 16 accumulated": {"batch_size": 4, "gradient_accumulation_steps": 16},
    OURS: {"batch_size": 64, "gradient_accumulation_steps": 1, "micro_batch_size": "auto"},
}
stock = load_stock("full_finetune_single_device")


class Ours(AdaptiveBatching, stock.FullFinetuneRecipeSingleDevice):  # type: ignore[misc, name-defined]
    """The recipe of the same name."""


def measure(way: str, inputs: str, device: str, samples: int) -> dict[str, Any]:
    """Train one epoch in this process."""
    with tempfile.TemporaryDirectory() as output_dir:
        cfg: Any = OmegaConf.load(ROOT / "recipes/configs/quickstart/full_single_device.yaml")
        changes = {
            "data_dir": inputs, "output_dir": output_dir, "device": device, "epochs": 1,
            "use_maximum_batch_size": False, "batch_increase_function": None, "clip_grad_norm": None,
            "adaptive_batching": {"memory_limit": "2GiB"},
            "tokenizer.max_seq_len": 512,
            "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1},  # Adam makes rounding as large as its step
            **WAYS[way],
        }  # fmt: skip
        for key, value in changes.items():
            OmegaConf.update(cfg, key, value, merge=False)
        cfg.dataset.split = f"train[:{samples}]"
        recipe = (Ours if way == OURS else stock.FullFinetuneRecipeSingleDevice)(cfg)
        start = time.perf_counter()
        recipe.setup(cfg)
        set_up = time.perf_counter() - start

        tokens = {"padded": 0, "real": 0, "forwards": 0}
        pad_id = recipe._tokenizer.pad_id

        def count(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            tokens["padded"] += kwargs["tokens"].numel()
            tokens["real"] += int((kwargs["tokens"] != pad_id).sum())
            tokens["forwards"] += 1

        recipe._model.register_forward_pre_hook(count, with_kwargs=True)
        losses: list[float] = []
        recipe._metric_logger.log_dict = lambda payload, step: losses.append(float(payload["loss"]))
        meter = memory_meter(device)
        meter.release()
        meter.reset_peak()
        start = time.perf_counter()
        recipe.train()
        meter.synchronize()
        seconds = time.perf_counter() - start
        return {
            "seconds": round(seconds, 2), "set_up_seconds": round(set_up, 2), "losses": losses, **tokens,
            "peak_mib": meter.peak_bytes() // 2**20,
        }  # fmt: skip


def evaluate(results: dict[str, list[dict[str, Any]]]) -> tuple[list[str], dict[str, float]]:
    """A Markdown table of medians, and the ratios."""

    def median(way: str, key: str) -> float:
        return statistics.median(result[key] for result in results[way])

    ours = median(OURS, "seconds")
    reference = next(iter(results.values()))[0]["losses"]
    rows = [
        "| way | seconds | seconds/ours | forwards | padded/real tokens | peak MiB | set-up seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for way in results:
        padding = median(way, "padded") / median(way, "real")
        seconds = median(way, "seconds")
        rows.append(
            f"| {way} | {seconds:.1f} | {seconds / ours:.2f} | {median(way, 'forwards'):.0f} | {padding:.2f} "
            f"| {median(way, 'peak_mib'):.0f} | {median(way, 'set_up_seconds'):.1f} |"
        )
    losses = [result["losses"] for way in results.values() for result in way]
    assert len({len(each) for each in losses}) == 1, "the ways took different numbers of steps"
    difference = max(abs(a - b) / b for each in losses for a, b in zip(each, reference, strict=True))
    first, second, _ = results
    return rows, {
        "speedup_vs_batch_64": round(median(first, "seconds") / ours, 2),
        "speedup_vs_accumulation": round(median(second, "seconds") / ours, 2),
        "loss_difference": float(f"{difference:.1e}"),
        "padding_ratio": round(median(OURS, "padded") / median(OURS, "real"), 3),
    }


def main() -> None:
    """Measure the ways in turn and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--samples", type=int, default=1280)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/epoch_time_<device>.md")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "INPUTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        way, inputs = args.measure
        print(json.dumps(measure(way, inputs, args.device, args.samples)))
        return

    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        inputs = Path(directory) / "inputs"
        build(inputs)
        for repeat in range(args.repeats):
            for way in [*WAYS][repeat % 3 :] + [*WAYS][: repeat % 3]:
                arguments = ["--device", args.device, "--samples", str(args.samples), "--measure", way, str(inputs)]
                result = measure_in_fresh_process(*arguments)
                results[way].append(result)
                shown = {key: value for key, value in result.items() if key != "losses"}
                print(f"{way}: {shown}, last loss {result['losses'][-1]:.4f}", flush=True)
    rows, ratios = evaluate(results)
    difference = f"losses of every step differ by at most {ratios['loss_difference']:.1e} of their value"
    write_report(
        "One epoch, 64 samples in each optimizer step",
        device=args.device,
        facts=[f"{args.samples} samples, medians of {args.repeats}; {difference}"],
        rows=rows,
        figures=ratios,
        output=args.output,
    )


if __name__ == "__main__":
    main()
