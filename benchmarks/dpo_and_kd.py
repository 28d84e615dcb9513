"""One epoch of preference optimization (dpo) and of distillation (kd), stock's recipes against ours.

    python benchmarks/epoch_time.py --recipe dpo kd  # about 5 minutes on 2 cores

``lora_dpo_single_device`` and ``knowledge_distillation_single_device`` train on the quickstart's data with the sizes
that stock's configs of them have (``batch_size=4 gradient_accumulation_steps=8``; of Llama 3.1, and from Llama 3.1 to
3.2), and ours with ``micro_batch_size=auto`` added to that: the same 32 pairs, or samples, in each optimizer step. A
pair is a docstring and that of another function. Samples are truncated at 512 tokens, and the teacher
has three times as many parameters as its student.

Only ``recipe.train()`` is timed, in fresh processes that take turns, as in ``epoch_time.py``. Losses of preferences are
compared with stock's. Stock divides the gradient of a distillation by its tokens twice, so that its model hardly learns
at the same learning rate; there losses are compared with those of our recipe where it runs the batches that stock runs
(``micro_batch_size=4``), once, and those of the first step with stock's. The last line printed is a JSON object of
ratios of medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import measure_in_fresh_process, measure_in_turns, write_report
from omegaconf import OmegaConf
from timed_epoch import time_epoch

from adaptive_batching._torchtune.cli.quickstart import Architecture, build, build_model, save_checkpoint
from adaptive_batching.torchtune import load_stock

ROOT = Path(__file__).parent.parent
BATCH_SIZE, ACCUMULATION = 4, 8
STOCK, AUTO, AS_STOCK = "stock", "ours, micro_batch_size=auto", "ours, micro_batch_size=4"
ADDED: dict[str, dict[str, Any]] = {
    STOCK: {},
    AUTO: {"micro_batch_size": "auto", "adaptive_batching": {"memory_limit": "2GiB"}},
    AS_STOCK: {"micro_batch_size": BATCH_SIZE},
}
TEACHER = Architecture(embed_dim=512, intermediate_dim=1536)


@dataclass(frozen=True)
class Kind:
    """A recipe, and what its config has besides the quickstart's."""

    recipe: str
    recipe_class: str
    config: str
    learning_rate: float
    added: dict[str, Any] = field(default_factory=dict)
    compared_with: str = STOCK


KINDS = {
    "dpo": Kind("lora_dpo_single_device", "LoRADPORecipeSingleDevice", "lora_dpo_single_device", 0.1),
    "kd": Kind(
        "knowledge_distillation_single_device", "KDRecipeSingleDevice", "lora_single_device", 1.0,
        {
            "teacher_model": {"_component_": "torchtune.models.llama2.llama2", **asdict(TEACHER)},
            "teacher_checkpointer": {
                "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "${data_dir}/teacher",
                "checkpoint_files": ["model.safetensors"], "output_dir": "${output_dir}", "model_type": "LLAMA2",
            },
            "kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
            "kd_ratio": 0.5,
            "clip_grad_norm": None,
        },
        compared_with=AS_STOCK,
    ),
}  # fmt: skip


def measure(kind: Kind, way: str, inputs: str, device: str, samples: int) -> dict[str, Any]:
    """Train one epoch in this process."""
    sys.path.insert(0, str(ROOT))  # our recipes/ before the folder that torchtune installs under the same name
    ours: Any = importlib.import_module(f"recipes.{kind.recipe}")
    with tempfile.TemporaryDirectory() as output_dir:
        cfg: Any = OmegaConf.load(ROOT / f"recipes/configs/quickstart/{kind.config}.yaml")
        changes = {
            "data_dir": inputs, "output_dir": output_dir, "device": device, "epochs": 1,
            "use_maximum_batch_size": False, "batch_increase_function": None, "adaptive_batching": None,
            "batch_size": BATCH_SIZE, "gradient_accumulation_steps": ACCUMULATION,
            "tokenizer.max_seq_len": 512, "dataset.split": f"train[:{samples}]",
            # Adam makes rounding as large as its step
            "optimizer": {"_component_": "torch.optim.SGD", "lr": kind.learning_rate},
            "lr_scheduler.num_warmup_steps": 2,
            **kind.added, **ADDED[way],
        }  # fmt: skip
        for key, value in changes.items():
            OmegaConf.update(cfg, key, value, merge=False)
        recipe = getattr(load_stock(kind.recipe) if way == STOCK else ours, kind.recipe_class)(cfg)
        start = time.perf_counter()
        recipe.setup(cfg)
        set_up = time.perf_counter() - start
        return {"set_up_seconds": round(set_up, 2), **time_epoch(recipe)}


def evaluate(
    kinds: Sequence[str], results: dict[str, list[dict[str, Any]]]
) -> tuple[list[str], list[str], dict[str, float]]:
    """A Markdown table of medians, what is to be said of losses, and the ratios."""
    rows = [
        "| recipe | way | seconds | seconds/auto | forwards | padded/real tokens | peak MiB | set-up seconds "
        "| loss, first and last step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    facts, ratios = [], {}
    for kind in kinds:

        def median(way: str, key: str, kind: str = kind) -> float:
            return statistics.median(result[key] for result in results[f"{kind}: {way}"])

        auto = median(AUTO, "seconds")
        for way in (way for way in ADDED if f"{kind}: {way}" in results):
            losses = results[f"{kind}: {way}"][0]["losses"]
            rows.append(
                f"| {kind} | {way} | {median(way, 'seconds'):.1f} | {median(way, 'seconds') / auto:.2f} "
                f"| {median(way, 'forwards'):.0f} | {median(way, 'padded') / median(way, 'real'):.2f} "
                f"| {median(way, 'peak_mib'):.0f} | {median(way, 'set_up_seconds'):.1f} "
                f"| {losses[0]:.4f}, {losses[-1]:.4f} |"
            )
        reference = KINDS[kind].compared_with
        ours = results[f"{kind}: {AUTO}"]
        difference = largest_difference(results[f"{kind}: {reference}"], ours)
        facts.append(f"{kind}: losses of every step differ from those of {reference!r} by at most {difference:.1e}")
        if reference != STOCK:
            first = largest_difference(results[f"{kind}: {STOCK}"], ours, steps=1)
            facts[-1] += f"; that of the first step from stock's by at most {first:.1e}"
        ratios[f"{kind}_stock_over_auto"] = round(median(STOCK, "seconds") / auto, 2)
    return rows, facts, ratios


def largest_difference(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], steps: int | None = None) -> float:
    """Return the largest difference of the loss of a step, of all or the first ``steps``, over its value."""
    runs = [result["losses"] for result in (*theirs, *ours)]
    assert len({len(losses) for losses in runs}) == 1, "the ways took different numbers of steps"
    return max(abs(a - b) / b for losses in runs for a, b in zip(losses[:steps], runs[0][:steps], strict=True))


def main(args: argparse.Namespace) -> None:
    """Measure the ways of each recipe in turn and write the result file; arguments are those of ``epoch_time.py``."""
    samples = args.samples or 384
    if args.measure:
        way, inputs = args.measure
        print(json.dumps(measure(KINDS[args.recipe[0]], way, inputs, args.device, samples)))
        return

    with tempfile.TemporaryDirectory() as directory:
        inputs = Path(directory) / "inputs"
        build(inputs)
        save_checkpoint(build_model(TEACHER, seed=1), inputs / "teacher", TEACHER)

        def arguments(named: str) -> list[str]:
            kind, _, way = named.partition(": ")
            options = ["--recipe", kind, "--device", args.device, "--samples", str(samples)]
            return [*options, "--measure", way, str(inputs)]

        results = measure_in_turns(
            [f"{kind}: {way}" for kind in args.recipe for way in (STOCK, AUTO)], args.repeats, arguments
        )
        for kind in args.recipe:
            named = f"{kind}: {KINDS[kind].compared_with}"
            if named not in results:
                results[named] = [measure_in_fresh_process(*arguments(named))]
    rows, facts, ratios = evaluate(args.recipe, results)
    write_report(
        "One epoch of preferences and of distillation, 32 pairs or samples in each optimizer step",
        device=args.device,
        facts=[
            f"{samples} pairs or samples, medians of {args.repeats}; tokens and forwards are those with a gradient",
            *facts,
        ],
        rows=rows,
        figures=ratios,
        output=args.output or ROOT / f"benchmarks/results/epoch_time_{'_'.join(args.recipe)}_{args.device}.md",
    )
