"""Compare the Hugging Face ``Trainer`` of ``examples/`` with ``auto_find_batch_size=True``, in the same memory limit.

    pip install -e '.[bench]'
    python benchmarks/without_torchtune.py --repeats 1   # about four minutes on 2 cores

Each runs in a fresh process with the same seed, model, optimizer and samples, whose lengths are spread as those of
instructions are: most are short, and few are eight times as long. The user asks for batches of 64. After a forward and
backward of one sample the process may take a fixed amount of memory more (RLIMIT_DATA), and ``train()`` is timed: an
epoch, with all that it takes to find a size.

- ``auto_find_batch_size=True`` (Accelerate's ``find_executable_batch_size``) takes a tenth off the batch at each
  out-of-memory error, and starts the epoch again, with the weights as they are by then.
- The example probes how many of the longest samples a forward holds, and runs each batch of 64 in as many forwards as
  it takes, filled by tokens.

A sample counts as seen when the optimizer has stepped on it. The truth is found by real steps in a process of its own:
the most of the longest samples that a forward and backward can hold next to gradients and optimizer states; every size
around the boundary is run. The last line printed is a JSON object: ``hf_size_found`` is what the example has found with
the trainer's own step, to be held against ``truth``, and ``seconds_vs_theirs`` is the example's time over theirs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import measure_in_fresh_process, write_report
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from adaptive_batching import AdaptiveBatchingConfig, is_out_of_memory

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from hugging_face_trainer import IGNORED, AdaptiveTrainer, Features, PaddingCollator

PACKAGES = ("torch", "transformers", "accelerate")
OURS, THEIRS, TRUTH = "example", "auto_find_batch_size", "truth"
TAME_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
BATCH_SIZE, LONGEST, VOCABULARY = 64, 384, 4096
LIMIT_MIB = 900


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LONGEST, pad_token_id=0,
        )
    )  # fmt: skip


def make_data(num_samples: int) -> list[Features]:
    """Samples with an ``index``, of log-normal lengths with a median of 48 tokens, truncated to ``LONGEST``."""
    chance = random.Random(0)
    data = []
    for index in range(num_samples):
        num_tokens = min(max(round(chance.lognormvariate(3.87, 0.8)), 4), LONGEST)
        ids = [chance.randrange(1, VOCABULARY) for _ in range(num_tokens)]
        data.append({"index": index, "input_ids": ids, "labels": [IGNORED, *ids[1:]]})
    data[chance.randrange(num_samples)].update(input_ids=[1] * LONGEST, labels=[IGNORED] + [1] * (LONGEST - 1))
    return data


class Seen(TrainerCallback):
    """Counts the samples of each optimizer step that was taken."""

    def __init__(self) -> None:
        self.in_step: list[int] = []
        self.indices: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.indices += self.in_step


class Ours(AdaptiveTrainer):
    """The example, which notes what it is given."""

    seen: Seen

    def training_step(self, model: Any, inputs: list[Features], num_items_in_batch: Any = None) -> torch.Tensor:
        self.seen.in_step = [sample["index"] for sample in inputs]
        return super().training_step(model, inputs, num_items_in_batch)


class IndexCollator(PaddingCollator):
    """Keeps the index of each sample in the batch."""

    def __call__(self, samples: list[Features]) -> dict[str, torch.Tensor]:
        return {**super().__call__(samples), "index": torch.tensor([sample["index"] for sample in samples])}


class Theirs(Trainer):
    """Stock's trainer, which notes what it is given."""

    seen: Seen
    failures = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.seen.in_step = inputs.pop("index").tolist()
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        except Exception as error:
            self.failures += is_out_of_memory(error)
            raise
        return loss


def make_trainer(method: str, num_samples: int, folder: str) -> Any:
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=BATCH_SIZE, num_train_epochs=1, max_grad_norm=1.0,
        auto_find_batch_size=method == THEIRS, remove_unused_columns=False, logging_strategy="no", save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    shared: dict[str, Any] = dict(model=make_model(), args=args, train_dataset=make_data(num_samples))
    if method == THEIRS:
        trainer: Any = Theirs(**shared, data_collator=IndexCollator())
    else:
        exact = AdaptiveBatchingConfig.from_mapping({"round_to_power_of_two": False, "headroom": 0})
        trainer = Ours(**shared, data_collator=PaddingCollator(), settings=exact)
    trainer.seen = Seen()
    trainer.add_callback(trainer.seen)
    return trainer


def loss_of(trainer: Any, samples: list[Features]) -> torch.Tensor:
    batch = PaddingCollator()(samples)
    loss: torch.Tensor = trainer.compute_loss(trainer.model, batch)
    return loss


def set_limit() -> None:
    """From now on this process may take ``LIMIT_MIB`` more."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + LIMIT_MIB * 2**20, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def find_truth(trainer: Any) -> int:
    """The largest size that fits, among all from 4 below the boundary up to 4 failures in a row above it."""
    optimizer = trainer.create_optimizer()
    longest = max(trainer.train_dataset, key=lambda sample: len(sample["input_ids"]))

    def fits(size: int) -> bool:
        failed = False
        try:
            for _ in range(2):
                loss_of(trainer, [longest] * size).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        optimizer.zero_grad()
        gc.collect()
        print(f"{size}: {'out of memory' if failed else 'fits'}", file=sys.stderr)
        return not failed

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    largest, size = low, max(low - 4, 1)
    while size <= largest + 4:
        largest = max(largest, size) if fits(size) else largest
        size += 1
    return largest


def measure(method: str, num_samples: int) -> dict[str, Any]:
    """Train, or find the truth, in this process, which is not fit for another measurement afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(method, num_samples, folder)
        loss_of(trainer, trainer.train_dataset[:1]).backward()  # type: ignore[no-untyped-call]
        trainer.model.zero_grad()
        set_limit()
        if method == TRUTH:
            return {"size": find_truth(trainer)}
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    seen = trainer.seen.indices
    ours = method == OURS
    return {
        "size": trainer.step.max_tokens // LONGEST if ours else trainer._train_batch_size,
        "failures": trainer.step.num_recoveries if ours else trainer.failures,
        "steps": trainer.state.global_step,
        "lost": num_samples - len(set(seen)),
        "repeated": len(seen) - len(set(seen)),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Measure each in a process of its own, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the table has all, the figures medians")
    parser.add_argument("--samples", type=int, default=512, help="samples of the epoch")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/without_torchtune_cpu.md")
    parser.add_argument("--measure", metavar="METHOD", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.samples)))
        return

    def run(method: str) -> dict[str, Any]:
        environment = {**TAME_MALLOC, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        found = measure_in_fresh_process("--measure", method, "--samples", str(args.samples), environment=environment)
        print(method, found, flush=True)
        return found

    truth = run(TRUTH)["size"]
    runs = [(method, run(method)) for _ in range(args.repeats) for method in (THEIRS, OURS)]
    columns = ["size", "failures", "steps", "lost", "repeated", "seconds"]
    rows = [
        "| run | size found | out of memory | optimizer steps | samples lost | samples seen again | seconds |",
        "|---" * 7 + "|",
        *("| " + " | ".join(map(str, [method, *(found[key] for key in columns)])) + " |" for method, found in runs),
    ]

    def of(method: str, key: str) -> list[Any]:
        return [found[key] for name, found in runs if name == method]

    write_report(
        "An epoch in a Hugging Face Trainer, with a batch size that is found",
        device="cpu",
        facts=[
            f"{LIMIT_MIB} MiB beyond the model, {args.samples} samples of up to {LONGEST} tokens, in batches of "
            f"{BATCH_SIZE}, as asked for",
            f"truth: {truth} of the longest samples in a forward and backward",
            f"{THEIRS} finds a size of whole batches of mixed lengths, and trains with that; the example finds how "
            f"many of the longest samples a forward holds, and trains with batches of {BATCH_SIZE}",
        ],
        rows=rows,
        figures={
            "hf_size_found": statistics.median_low(of(OURS, "size")),
            "truth": truth,
            "samples_lost_ours": max(of(OURS, "lost")),
            "samples_repeated_ours": max(of(OURS, "repeated")),
            "samples_repeated_theirs": statistics.median_low(of(THEIRS, "repeated")),
            "seconds_vs_theirs": round(
                statistics.median(of(OURS, "seconds")) / statistics.median(of(THEIRS, "seconds")), 2
            ),
        },
        output=args.output,
        packages=PACKAGES,
    )


if __name__ == "__main__":
    main()
