"""Compare an update of TRL's GRPO with and without ``adaptive``, in the same memory limit, and when memory shrinks.

    pip install -e '.[bench]'
    python benchmarks/generated.py   # about 15 minutes on 2 cores

A Llama with a vocabulary of 32 thousand learns from 64 completions of 8 to 256 tokens in each update, whose lengths are
drawn from a log-normal distribution, after prompts of 8 to 64. They are drawn and not generated, by TRL's
``rollout_func``, as generation is the same on both sides; all else is TRL's. Each way runs in a process of its own,
with the same weights, completions and rewards. After one forward and backward of a single completion the process may
take a fixed amount of memory more (RLIMIT_DATA).

- ``TRL, n at once``: ``per_device_train_batch_size=n``, accumulated to 64, as one does by hand. What runs out of memory
  is in the table, too.
- ``adaptive``: batches of 64 with ``micro_batch_size="auto"``. ``adaptive, padded`` has ``padding=True``.

``seconds`` are those of an update, the median of those after the first; set-up is that of the first beyond it. A loss
is a sum over the tokens of all 64 (``dapo``), so that gradients may be compared: the norm of each update's is compared
with that of TRL with the smallest batch.

With ``shrinking``, a tenth of what the process may still grow by is taken away after each of 25 updates of eight
completions, down to what a single one needs: updates that were taken, and completions that were lost. The last line
printed is a JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import ProcessFailed, measure_in_fresh_process, write_report

VOCABULARY, GLOBAL, PROMPT, COMPLETION = 32_000, 64, 64, 256
LIMIT_MIB, LEAST_MIB, UPDATES = 1500, 500, 3
WAYS = {
    **{f"TRL, {size} at once": (size, None) for size in (16, 8, 4, 2)},
    "adaptive": (GLOBAL, {"micro_batch_size": "auto"}),
    "adaptive, padded": (GLOBAL, {"micro_batch_size": "auto", "padding": True}),
}
SHRINKING = "adaptive, shrinking"
TAME_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
PACKAGES = ("torch", "transformers", "trl", "accelerate")


def make_trainer(folder: str, at_once: int, ours: Any, *, updates: int, in_all: int = GLOBAL) -> Any:
    """Return a trainer on a tiny model, and count what its reward function is asked for in ``trainer.asked``."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from adaptive_batching.transformers import adaptive

    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(VOCABULARY - 2))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=512, pad_token_id=0, eos_token_id=1, tie_word_embeddings=True,
        )
    )  # fmt: skip
    draw, asked = random.Random(0), []

    def drawn(prompts: list[str], trainer: Any) -> dict[str, Any]:
        lengths = [min(max(round(math.exp(draw.gauss(4.0, 0.8))), 8), COMPLETION) for _ in prompts]
        return {
            "prompt_ids": tokenizer(prompts)["input_ids"],
            "completion_ids": [[draw.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths],
            "logprobs": None,
        }

    def rewarded(completions: list[str], **columns: Any) -> list[float]:
        asked.append(len(completions))
        return [len(text) % 17 / 17 for text in completions]

    prompts = [" ".join(f"w{(7 * n + at) % 31_000}" for at in range(8 + 13 * n % (PROMPT - 8))) for n in range(512)]
    args = GRPOConfig(
        folder, per_device_train_batch_size=at_once, gradient_accumulation_steps=in_all // at_once, num_generations=4,
        max_completion_length=COMPLETION, max_steps=updates, logging_steps=1, learning_rate=1e-5, report_to="none",
        save_strategy="no", bf16=False, use_cpu=True, disable_tqdm=True, gradient_checkpointing=False, seed=0,
    )  # fmt: skip
    trainer = adaptive(GRPOTrainer)(
        model, rewarded, args, Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer, rollout_func=drawn, **({"adaptive": ours} if ours else {}),
    )  # fmt: skip
    trainer.asked = asked
    return trainer


def status(key: str) -> int:
    """Return bytes of this process from /proc."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def limit_to(extra_bytes: int) -> None:
    """Let the process grow by no more than this."""
    gc.collect()
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + extra_bytes, -1))


def measure(way: str) -> dict[str, Any]:
    """Train for a few updates; what does not fit ends with the error that it ends with."""
    from transformers import PrinterCallback, TrainerCallback

    seconds: list[float] = []
    start = time.perf_counter()

    class Sees(TrainerCallback):
        norms: list[float] = []  # noqa: RUF012

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.start)
            if way == SHRINKING:
                limit_to(round(max(LIMIT_MIB * 0.9**state.global_step, LEAST_MIB) * 2**20))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "grad_norm" in logs:
                self.norms.append(float(logs["grad_norm"]))

    with tempfile.TemporaryDirectory() as folder:
        if way == SHRINKING:
            trainer = make_trainer(folder, 8, {"micro_batch_size": "auto"}, updates=25, in_all=8)
        else:
            trainer = make_trainer(folder, *WAYS[way], updates=UPDATES)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(sees := Sees())
        ids = torch.ones(1, 64, dtype=torch.long)
        trainer.model(input_ids=ids).logits[:, -1:].sum().backward()
        trainer.model.zero_grad()
        limit_to(LIMIT_MIB * 2**20)
        start = time.perf_counter()
        trainer.train()
        adapted = getattr(trainer, "adaptive", None)
        return {
            "seconds": statistics.median(seconds[1:]), "set_up": seconds[0] - statistics.median(seconds[1:]),
            "updates": len(seconds), "norms": sees.norms, "completions": sum(trainer.asked),
            "recoveries": adapted.num_recoveries if adapted else 0, "whole": time.perf_counter() - start,
        }  # fmt: skip


def main() -> None:
    """Measure each way in a process of its own, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/generated_cpu.md")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    found: dict[str, Any] = {}
    for way in (*WAYS, SHRINKING):
        try:
            found[way] = measure_in_fresh_process("--measure", way, environment=TAME_MALLOC)
        except ProcessFailed as error:
            text = str(error).splitlines()[-1]
            found[way] = {"error": "out of memory" if "can't allocate memory" in text else text[:90]}
        print(way, found[way], flush=True)
    ran = {way: each for way, each in found.items() if "seconds" in each and way in WAYS}
    by_hand = min((each["seconds"] for way, each in ran.items() if way.startswith("TRL")), default=math.nan)
    exact = ran[[*ran][-3 if len(ran) > 2 else -1]]["norms"]  # of TRL, with the fewest at once
    ours = found["adaptive"]["seconds"]
    rows = [
        "| way | seconds of an update | over adaptive | set-up | recoveries | norm of gradients, off |",
        "|---" * 6 + "|",
    ]
    for way in WAYS:
        each = found[way]
        if "error" in each:
            rows.append(f"| {way} | {each['error']} | | | | |")
            continue
        off = max(abs(one - other) / other for one, other in zip(each["norms"], exact, strict=True))
        rows.append(
            f"| {way} | {each['seconds']:.2f} | {each['seconds'] / ours:.2f} | {each['set_up']:.1f} | "
            f"{each['recoveries']} | {off:.0e} |"
        )
    shrinking = found[SHRINKING]
    figures = {
        "by_hand_over_adaptive": round(by_hand / ours, 2), "shrinking_updates": shrinking.get("updates"),
        "shrinking_lost": 8 * 25 - shrinking.get("completions", 0), "shrinking_recoveries": shrinking.get("recoveries"),
    }  # fmt: skip
    write_report(
        "An update of GRPO, with and without adaptive", device="cpu",
        facts=[f"{LIMIT_MIB} MiB more than rests after one completion; {GLOBAL} completions an update"],
        rows=rows, figures=figures, output=args.output, packages=PACKAGES,
    )  # fmt: skip


if __name__ == "__main__":
    main()
