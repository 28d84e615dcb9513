"""Ask a dry run what an update of GRPO takes on a card, by TRL alone and with ``adaptive``, for models of real sizes.

    python benchmarks/generated_on_a_card.py    # with a CUDA build of torch, and no GPU

Models have the shapes of Qwen2.5 with 0.5 and 3 billion parameters, and all weights are trained, in bfloat16. A batch
is 32 or 512 completions of 512 tokens, after prompts of up to 128. They are drawn and not generated, by TRL's
``rollout_func``, as generation is the same on both sides. The peak is that of three updates. The last line printed is a
JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import write_report

ROOT = Path(__file__).parent.parent
SHAPES = {
    "0.5 billion": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                        num_key_value_heads=2),
    "3 billion": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
                      num_key_value_heads=2),
}  # fmt: skip
VOCABULARY, PROMPT, COMPLETION = 151_936, 128, 512
BATCHES = (32, 512)
CARD = "H100"
WAYS = ("TRL", "adaptive")
GIB = 2**30


def train(model_name: str, way: str, completions: int) -> None:
    """Take three updates: what a dry run executes."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from adaptive_batching.transformers import adaptive

    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(998))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    config = Qwen2Config(
        vocab_size=VOCABULARY, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, **SHAPES[model_name]
    )
    with torch.device("cuda"):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    prompts = [" ".join(f"w{(7 * row + at) % 998}" for at in range(PROMPT - row % 64)) for row in range(512)]

    def drawn(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[(7 * number + at) % 998 + 2 for at in range(COMPLETION)] for number in range(len(prompts))]
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}

    args = GRPOConfig(
        "outputs/grpo_on_a_card", per_device_train_batch_size=completions, num_generations=8, max_steps=3,
        max_completion_length=COMPLETION, bf16=True, gradient_checkpointing=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = (adaptive(GRPOTrainer) if way == "adaptive" else GRPOTrainer)(
        model, lambda completions, **columns: [float(len(text)) for text in completions], args,
        Dataset.from_list([{"prompt": prompt} for prompt in prompts]), processing_class=tokenizer, rollout_func=drawn,
        **({"adaptive": "auto"} if way == "adaptive" else {}),
    )  # fmt: skip
    trainer.train()


def dry_run(model_name: str, way: str, completions: int) -> dict[str, Any]:
    """Return what a dry run says of it."""
    command = [sys.executable, "-m", "adaptive_batching", "dry-run", "--json", "--gpu", CARD, "--no-time", "--"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, str(Path(__file__).resolve()), "--train", model_name, way, str(completions)]
    done = subprocess.run([*command, *program], env=environment, text=True, capture_output=True, check=False)
    if not done.stdout.strip():
        raise RuntimeError(done.stderr[-3000:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    """Run each model in each way, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/generated_on_a_card_emulated.md")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        model_name, way, completions = args.train
        train(model_name, way, int(completions))
        return
    rows = ["| parameters | completions | way | answer | peak, GiB allocated | reserved |", "|---" * 6 + "|"]
    figures = {}
    for model_name, completions, way in itertools.product(args.models, BATCHES, WAYS):
        answer = dry_run(model_name, way, completions)
        print(model_name, completions, way, {key: answer.get(key) for key in ("fits", "why", "steps")}, flush=True)
        said = {True: "fits", False: "does not fit", None: "cannot tell"}[answer["fits"]]
        peak, reserved = (answer[f"peak_{kind}_bytes"] / GIB for kind in ("allocated", "reserved"))
        rows.append(f"| {model_name} | {completions} | {way} | {said} | {peak:.2f} | {reserved:.2f} |")
        figures[f"{model_name}, {completions}, {way}"] = round(peak, 2)
    write_report(
        "An update of GRPO on a card, by dry runs", device="cpu",
        facts=[
            f"{CARD}; completions of {COMPLETION} tokens after prompts of up to {PROMPT}, "
            f"a vocabulary of {VOCABULARY:,}, bfloat16, gradient checkpointing, AdamW; three updates",
        ],
        rows=rows, figures=figures, output=args.output or ROOT / "benchmarks/results/generated_on_a_card_emulated.md",
        packages=("torch", "transformers", "trl", "accelerate"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
