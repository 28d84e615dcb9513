"""Compare ``adaptive(Trainer)`` with what Hugging Face's ``Trainer`` has of its own, in the same memory limit.

    pip install -e '.[bench]' online-dynamic-batching
    python benchmarks/trainer_vs_peers.py   # about 10 minutes on 2 cores

Each runs in a fresh process with the same seed, model, optimizer and samples: docstrings of Python's standard library,
by words, of up to 384. The optimizer is to see 64 samples in a step. After a forward and backward of one sample the
process may take a fixed amount of memory more (RLIMIT_DATA), and ``train()`` is timed: an epoch, with all that it takes
to find a size.

- ``Trainer`` has the batch of a person who knows what fits: the largest power of two of the longest samples that a
  forward holds, accumulated to 64. So have ``group_by_length`` and ``batch_rebalance``, its sampling strategies, and
  ``padding_free``, which lays samples end to end, as ``SFTTrainer`` does with the setting of that name; if it runs out
  of memory with that batch, the person takes half of it, and so on.
- ``auto_find_batch_size`` is asked for batches of 64. It takes a tenth off at each out-of-memory error, and starts the
  epoch again, with the weights as they are by then.
- ``adaptive`` is asked for batches of 64 with ``micro_batch_size="auto"``, which lays samples end to end. So are
  ``adaptive, padded``, which does not, ``adaptive, group_by_length``, with Trainer's sampling strategy, and
  ``adaptive, padding_free``, whose collate function lays samples end to end. ``adaptive, largest``
  is asked for the largest forward (``use_maximum_batch_size`` with ``keep_global_batch``), which tells
  ``found_over_truth``.
- ``odb`` (online-dynamic-batching) is told the tokens that ``adaptive, largest`` has found. It makes batches of so
  many, and accumulates as many of these as make 64 samples on average. If it runs out of memory, it is told three
  quarters of that, and so on.
- ``bound`` is what none of these can beat: a bare loop over the samples end to end, without a trainer, a limit or a
  set-up, in forwards of about as many tokens as it is told. The fastest of three sizes counts.

With ``short``, memory shrinks after two optimizer steps, as where another process takes some: who survives, with what.
``tried`` has the steps that were taken to find a size, and how many of them ran out of memory; ``seconds`` include
them, and all else up to the first step, which is ``set_up``.

A sample counts as seen when the optimizer has stepped on it. The truth is found by real steps in a process of its own:
the most of the longest samples that a forward and backward can hold next to gradients and optimizer states, one of them
the shortest instead, as a model makes no mask of attention for a batch without padding. There glibc returns freed
memory at once; all others run with glibc as it comes. The loss of each step is held against ``whole``: Trainer with
batches of 64 in one forward, without a limit; that of ``adaptive, group_by_length`` against ``group_by_length``, which
has the same samples in a step. The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.util
import json
import os
import random
import re
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from common import largest_of_all, measure_in_fresh_process, write_report
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from adaptive_batching import AdaptiveBatchingError, _state, is_out_of_memory
from adaptive_batching._memory.unused_memory import keep_freed_memory_on_the_host, keep_little_on_the_host
from adaptive_batching._probe import trial
from adaptive_batching._transformers.row_of_samples import RowAttention
from adaptive_batching.attention import SampleBounds
from adaptive_batching.transformers import AdaptiveArguments, adaptive

PACKAGES = ("torch", "transformers", "accelerate", "online-dynamic-batching")
OURS, WHOLE, TRUTH, FINDS, ODB, FLAT = "adaptive", "whole", "truth", "auto_find_batch_size", "odb", "padding_free"
BOUND = "bound"
GROUPED = "group_by_length"
OURS_FLAT, OURS_GROUPED, LARGEST = f"{OURS}, {FLAT}", f"{OURS}, {GROUPED}", f"{OURS}, largest"
OURS_PADDED = f"{OURS}, padded"
STRATEGIES = {GROUPED: GROUPED, OURS_GROUPED: GROUPED, "batch_rebalance": "batch_rebalance"}
BY_HAND = ["Trainer", GROUPED, "batch_rebalance", FLAT]
IN_PARTS = [OURS, OURS_PADDED, OURS_GROUPED, OURS_FLAT]
ALL_OURS = [*IN_PARTS, LARGEST]
SAME_STEPS = {
    **dict.fromkeys(["Trainer", FLAT, OURS, OURS_PADDED, OURS_FLAT, LARGEST], WHOLE),
    OURS_GROUPED: GROUPED,
}  # the other run whose steps have the same samples
PEERS = [*BY_HAND, FINDS, *([ODB] if importlib.util.find_spec("odb") else [])]
BATCH_SIZE, LONGEST, VOCABULARY = 64, 384, 4096
LIMIT_MIB, SHRINKS_BY_MIB, STEPS_BEFORE = 900, 350, 2
ROWS_OF_BOUND = 1024, 1536, 2048  # tokens
Features = dict[str, Any]


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LONGEST, pad_token_id=0,
        )
    )  # fmt: skip


def docstrings() -> list[str]:
    found = set()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                found.add(text)
    return sorted(found)


def make_data(
    num_samples: int, longest: int = LONGEST, vocabulary: int = VOCABULARY, repeats: int = 1
) -> list[Features]:
    """Samples with an ``index``, of docstrings by words, each ``repeats`` times over; one of them has ``longest``."""
    texts = [re.findall(r"\w+|[^\w\s]", text) for text in docstrings()]
    texts = [words for words in texts if len(words) >= 4]
    known = Counter(word for words in texts for word in words).most_common(vocabulary - 2)
    number = {word: rank + 2 for rank, (word, _) in enumerate(known)}
    chosen = [*random.Random(0).sample(texts, num_samples - 1), [word for words in texts for word in words]]
    rows = [[number.get(word, 1) for word in (words * repeats)[:longest]] for words in chosen]
    random.Random(1).shuffle(rows)
    return [{"index": index, "input_ids": ids, "labels": ids} for index, ids in enumerate(rows)]


def collate(samples: list[Features]) -> dict[str, torch.Tensor]:
    def padded(rows: list[Any], value: int) -> torch.Tensor:  # [b, s]
        return pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value)

    return {
        "input_ids": padded([sample["input_ids"] for sample in samples], 0),
        "attention_mask": padded([[1] * len(sample["input_ids"]) for sample in samples], 0),
        "labels": padded([sample["labels"] for sample in samples], -100),
        "index": torch.tensor([sample["index"] for sample in samples]),
    }


def collate_flat(samples: list[Features]) -> dict[str, torch.Tensor]:
    """Lay samples end to end, without a padding token."""
    rows = [{key: sample[key] for key in ("input_ids", "labels")} for sample in samples]
    return {**DataCollatorWithFlattening()(rows), "index": torch.tensor([sample["index"] for sample in samples])}


def of_model(inputs: Any) -> dict[str, torch.Tensor]:
    return {key: value for key, value in inputs.items() if key != "index"}


class Watched(Trainer):
    """Notes the samples and tokens of each forward of training, and what runs out of memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.in_step: list[int] = []
        self.tokens = self.padded_tokens = self.failures = self.steps_before_failure = 0
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        indices = inputs.pop("index").tolist()
        try:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        except Exception as error:
            if is_out_of_memory(error):
                self.failures += 1
                self.steps_before_failure = self.seen.steps
            raise
        if _state.rehearsing or trial.probing:  # an audit or a probe, whose state is put back, and this list not
            return loss
        self.in_step += indices
        self.padded_tokens += inputs["input_ids"].numel()
        self.tokens += (
            int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else inputs["input_ids"].numel()
        )
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, of_model(inputs), *args, **kwargs)


class Seen(TrainerCallback):
    """Counts the samples of each optimizer step that was taken, and shrinks the limit in the middle."""

    def __init__(self, *, shrinks: bool) -> None:
        self.trainer: Any = None
        self.indices: list[int] = []
        self.steps = 0
        self.first_step = 0.0
        """When training began, on the clock of ``time.perf_counter``."""

        self._shrinks = shrinks

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step = self.first_step or time.perf_counter()
        self.trainer.in_step.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.indices += self.trainer.in_step
        self.steps += 1
        if self._shrinks and state.global_step == STEPS_BEFORE:
            limit, most = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (limit - SHRINKS_BY_MIB * 2**20, most))


def arguments(method: str, by_hand: int, budget: int, lengths: list[int]) -> dict[str, Any]:
    """Return the settings of a method."""
    if method == ODB:  # makes batches of up to so many padded tokens of what its worker has prepared
        batches = max(round(BATCH_SIZE * sum(lengths) / len(lengths) / budget), 1)
        return dict(per_device_train_batch_size=1, gradient_accumulation_steps=batches)
    size = by_hand if method in BY_HAND else 1 if method == LARGEST else BATCH_SIZE
    return dict(
        per_device_train_batch_size=size, gradient_accumulation_steps=BATCH_SIZE // size,
        auto_find_batch_size=method == FINDS,
        train_sampling_strategy=STRATEGIES.get(method, "random"),
    )  # fmt: skip


def ours(method: str) -> AdaptiveArguments:
    exact: dict[str, Any] = {"headroom": 0, "round_to_power_of_two": False}
    if method == LARGEST:
        return AdaptiveArguments(use_maximum_batch_size=True, **exact, keep_global_batch=True)
    return AdaptiveArguments(micro_batch_size="auto", **exact, padding=method == OURS_PADDED)


def make_trainer(method: str, num_samples: int, by_hand: int, budget: int, folder: str, *, shrinks: bool) -> Any:
    data = make_data(num_samples)
    args = TrainingArguments(
        output_dir=folder, num_train_epochs=1, max_grad_norm=1.0, remove_unused_columns=False, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        **arguments(method, by_hand, budget, [len(each["input_ids"]) for each in data]),
    )  # fmt: skip
    seen = Seen(shrinks=shrinks)
    shared: dict[str, Any] = dict(
        model=make_model(), args=args, train_dataset=data, callbacks=[seen],
        data_collator=collate_flat if method in (FLAT, OURS_FLAT) else collate,
    )  # fmt: skip
    if method in ALL_OURS:
        trainer: Any = adaptive(Watched)(**shared, adaptive=ours(method))
    else:
        trainer = Watched(**shared)
    seen.trainer = trainer
    trainer.seen = seen
    if method == ODB:
        from odb.integrations.hf import enable_odb

        # Its own way, by Trainer's loader, does not take what Accelerate makes of that.
        loader: Any = DataLoader(data, 1, shuffle=True, num_workers=1, prefetch_factor=64, collate_fn=collate)  # type: ignore[arg-type]
        enable_odb(trainer, train_dataloader=loader, train_dataset=data, token_budget=budget)
    return trainer


def set_limit() -> None:
    """From now on this process may take ``LIMIT_MIB`` more."""
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + LIMIT_MIB * 2**20, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def find_truth(trainer: Any) -> int:
    """The largest size that fits, among all from 4 below the boundary up to 4 failures in a row above it."""
    optimizer = trainer.create_optimizer()
    shortest, *_, longest = sorted(trainer.train_dataset, key=lambda sample: len(sample["input_ids"]))

    def fits(size: int) -> bool:
        failed = False
        try:
            for _ in range(2):
                batch = [*[longest] * (size - 1), shortest if size > 1 else longest]
                trainer.compute_loss(trainer.model, collate(batch)).backward()
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

    return largest_of_all(fits)


def measure(method: str, num_samples: int, by_hand: int, budget: int, *, shrinks: bool) -> dict[str, Any]:
    """Train, or find the truth, in this process, which is not fit for another measurement afterwards."""
    error = ""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(method, num_samples, by_hand, budget, folder, shrinks=shrinks)
        trainer.model(**of_model(collate(trainer.train_dataset[:1]))).loss.backward()
        trainer.model.zero_grad()
        if method != WHOLE:
            set_limit()
        if method == TRUTH:
            keep_little_on_the_host()  # so that nothing but the samples decides
            return {"size": find_truth(trainer)}
        start, processor = time.perf_counter(), time.process_time()
        try:
            trainer.train()
        except (RuntimeError, MemoryError, AdaptiveBatchingError) as failure:
            gave_up = "No executable batch size" in str(failure)  # Accelerate, at a batch of one
            if not (is_out_of_memory(failure) or gave_up or isinstance(failure, AdaptiveBatchingError)):
                raise
            error = "out of memory"
        seconds, processor = time.perf_counter() - start, time.process_time() - processor
    seen = trainer.seen.indices
    return {
        **what_was_found(method, trainer, budget),
        "steps": trainer.state.global_step,
        "lost": num_samples - len(set(seen)),
        "repeated": len(seen) - len(set(seen)),
        "padding": round(trainer.padded_tokens / max(trainer.tokens, 1), 2),
        "seconds": round(seconds, 1),
        "processor": round(processor, 1),
        "set_up": round((trainer.seen.first_step or start + seconds) - start, 1),  # all, if no step was begun
        "ended": error,
        "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
    }


def measure_bound(num_samples: int, row_tokens: int) -> dict[str, Any]:
    """Train in a bare loop, in rows of about ``row_tokens``."""
    data, model = make_data(num_samples), make_model().train()
    optimizer, attention = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True), RowAttention(model)
    model(**of_model(collate(data[:1]))).loss.backward()
    model.zero_grad()
    keep_freed_memory_on_the_host()
    start, processor = time.perf_counter(), time.process_time()
    for step in range(0, num_samples, BATCH_SIZE):
        samples = sorted((each["input_ids"] for each in data[step : step + BATCH_SIZE]), key=len, reverse=True)
        rows: list[list[list[int]]] = [[] for _ in range(max(round(sum(map(len, samples)) / row_tokens), 1))]
        for sample in samples:
            min(rows, key=lambda row: sum(map(len, row))).append(sample)
        targets = sum(len(sample) - 1 for sample in samples)
        for row in rows:
            bounds = SampleBounds([len(sample) for sample in row])
            batch = {
                "input_ids": torch.tensor([[token for sample in row for token in sample]]),
                "labels": torch.tensor([[token for sample in row for token in (-100, *sample[1:])]]),
                "position_ids": bounds.positions(),
            }
            with attention.within(bounds):
                model(**batch, num_items_in_batch=targets).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    return {"row": row_tokens, "seconds": round(seconds, 1), "processor": round(processor, 1)}


def what_was_found(method: str, trainer: Any, budget: int) -> dict[str, Any]:
    """Return the longest samples that a forward takes, what finding that took, and what ran out of memory later."""
    if method in ALL_OURS:
        probe = trainer.adaptive.probe
        tried = probe.measurements if probe else []
        return {
            "size": (probe.enough or probe.batch_size) if probe else 0,
            "tried": f"{sum(each.steps for each in tried)}, {sum(not each.fits for each in tried)}",
            "failures": trainer.adaptive.num_recoveries,
        }
    found = f"{trainer.steps_before_failure + trainer.failures}, {trainer.failures}"
    return {
        "size": budget // LONGEST if method == ODB else trainer._train_batch_size,
        "tried": found if method == FINDS else "given",
        "failures": 0 if method == FINDS else trainer.failures,
    }


def main() -> None:
    """Measure each in a process of its own, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; the table has all, the figures medians")
    parser.add_argument("--samples", type=int, default=512, help="samples of the epoch")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/trainer_vs_peers_cpu.md")
    parser.add_argument("--measure", metavar="METHOD", help=argparse.SUPPRESS)
    parser.add_argument("--by-hand", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--shrinks", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure == BOUND:
        print(json.dumps(measure_bound(args.samples, args.budget)))
        return
    if args.measure:
        found = measure(args.measure, args.samples, args.by_hand, args.budget, shrinks=args.shrinks)
        print(json.dumps(found))
        return

    def run(method: str, *more: str) -> dict[str, Any]:
        environment = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        given = ("--measure", method, "--samples", str(args.samples), *more)
        found = measure_in_fresh_process(*given, environment=environment)
        print(method, *more, {key: value for key, value in found.items() if key != "losses"}, flush=True)
        return found

    truth = run(TRUTH)["size"]
    whole = run(WHOLE)
    sizes = dict.fromkeys(BY_HAND, 2 ** (truth.bit_length() - 1))
    while run(FLAT, "--by-hand", str(sizes[FLAT]))["ended"] and sizes[FLAT] > 1:
        sizes[FLAT] //= 2
    largest = run(LARGEST)
    budget = LONGEST * int(largest["size"])
    while ODB in PEERS and budget > LONGEST and run(ODB, "--budget", str(budget))["ended"]:
        budget = budget * 3 // 4

    def given(method: str) -> list[str]:
        return ["--by-hand", str(sizes.get(method, 1)), "--budget", str(budget)]

    runs, bounds = [(LARGEST, largest)], []
    for _ in range(args.repeats):
        runs += [(method, run(method, *given(method))) for method in (*IN_PARTS, *PEERS)]
        bounds += [run(BOUND, "--budget", str(tokens)) for tokens in ROWS_OF_BOUND]
    runs += [(f"{method}, short", run(method, *given(method), "--shrinks")) for method in (*PEERS, *IN_PARTS)]
    report(args.output, args.samples, truth, whole, runs, bounds)


def report(
    output: Path | None, samples: int, truth: int, whole: Any, runs: list[tuple[str, Any]], bounds: list[Any]
) -> None:
    """Write the table and the figures."""
    columns = ["size", "tried", "failures", "steps", "lost", "repeated", "padding", "difference", "seconds",
               "processor", "set_up", "ended"]  # fmt: skip
    losses = {name: found["losses"] for name, found in [(WHOLE, whole), *runs] if not found["ended"]}
    for name, found in runs:
        found["difference"] = ""
        if name in losses and SAME_STEPS.get(name) in losses:
            pairs = zip(found["losses"], losses[SAME_STEPS[name]], strict=True)
            found["difference"] = f"{max(abs(one - other) / other for one, other in pairs):.0e}"
    rows = [
        "| run | size | tried | out of memory | steps | lost | seen again | padded over real tokens | loss differs by "
        "| seconds | of a processor | of set-up | ended |",
        "|---" * 13 + "|",
        *("| " + " | ".join(map(str, [method, *(found[key] for key in columns)])) + " |" for method, found in runs),
    ]

    def of(method: str, key: str) -> list[Any]:
        return [found[key] for name, found in runs if name == method]

    def seconds(method: str, key: str = "seconds") -> float:
        return float(statistics.median(of(method, key)))

    finished = [method for method in PEERS if not any(of(method, "ended"))]
    best, ours = min(map(seconds, finished)), min(IN_PARTS, key=seconds)
    bound = min(
        statistics.median(each["seconds"] for each in bounds if each["row"] == tokens) for tokens in ROWS_OF_BOUND
    )
    processor = {method: seconds(method, "processor") for method in (*finished, *IN_PARTS)}
    write_report(
        "An epoch in a Hugging Face Trainer, in a memory limit",
        device="cpu",
        facts=[
            f"{LIMIT_MIB} MiB beyond the model, {samples} samples of up to {LONGEST} tokens, {BATCH_SIZE} in a step",
            f"truth: {truth} of the longest samples in a forward and backward; the largest power of two of these is "
            f"what Trainer, group_by_length and batch_rebalance are given by hand",
            f"short: after {STEPS_BEFORE} steps the limit is {SHRINKS_BY_MIB} MiB lower",
            f"whole: {whole['seconds']} s without a limit, in one forward of {BATCH_SIZE}",
            "bound: " + ", ".join(f"{each['seconds']} s in rows of {each['row']} tokens" for each in bounds),
        ],
        rows=rows,
        figures={
            "seconds_vs_best_peer": round(seconds(ours) / best, 2),
            "without_set_up": round((seconds(ours) - seconds(ours, "set_up")) / best, 2),
            "without_set_up_vs_bound": round((seconds(ours) - seconds(ours, "set_up")) / bound, 2),
            "bound_vs_best_peer": round(bound / best, 2),
            "processor_vs_best_peer": round(
                min(processor[method] for method in IN_PARTS) / min(processor[method] for method in finished), 2
            ),
            "end_to_end_vs_padded": round(processor[OURS] / processor[OURS_PADDED], 2),
            "in_order_vs_best_peer": round(min(seconds(OURS), seconds(OURS_FLAT)) / best, 2),
            "grouped_vs_grouped": round(seconds(OURS_GROUPED) / seconds(GROUPED), 2),
            "padding_free_vs_padding_free": round(seconds(OURS_FLAT) / seconds(FLAT), 2),
            "samples_lost": max(lost for method in ALL_OURS for lost in of(method, "lost")),
            "samples_repeated": max(repeated for method in ALL_OURS for repeated in of(method, "repeated")),
            "peers": finished,
            "survive_short": [method for method in (*PEERS, *IN_PARTS) if not any(of(f"{method}, short", "ended"))],
            "loss_difference": max(float(each) for method in ALL_OURS for each in of(method, "difference")),
            "found_over_truth": round(of(LARGEST, "size")[0] / truth, 2),
        },
        output=output,
        packages=PACKAGES,
    )


if __name__ == "__main__":
    main()
