"""What a version of transformers and TRL trains with us and without us, and how far apart that is.

python -m tests.support.versions prints a row for each kind of trainer and setting, with what is installed. The
environments of `make test-stacks` have other versions.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.conftest import all_that_fits, without_pages
from tests.transformers import trainers

KINDS = ("Trainer", "SFT", "DPO", "Reward")


def make(kind: str, folder: Path, ours: AdaptiveArguments | None, **more: Any) -> Any:
    """Return a trainer of 24 samples, 8 of which make a batch, for three steps.

    Raises:
        RuntimeError: If TRL itself cannot import its trainer with what is installed, as 0.24 cannot for DPO.
    """
    settings = {"max_steps": 3, **more}
    if kind == "Trainer":
        return trainers.make_trainer(folder, ours, data=trainers.make_data(24), **settings)
    import trl
    from datasets import Dataset

    from tests.transformers.test_trl import make_tokenizer

    made, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    chance = random.Random(0)

    def ids(most: int) -> list[int]:
        return [chance.randrange(3, trainers.VOCABULARY) for _ in range(chance.randrange(3, most))]

    if kind == "SFT":  # whose data are tokens already
        rows: list[dict[str, Any]] = [{"input_ids": ids(24)} for _ in range(24)]
    else:
        keys = ("prompt", "chosen", "rejected")[kind == "Reward" :]
        rows = [{key: " ".join(f"w{i}" for i in ids(12)) for key in keys} for _ in range(24)]
    given: dict[str, Any] = {"train_dataset": Dataset.from_list(rows)}
    model = trainers.make_llama()
    if kind == "Reward":
        torch.manual_seed(0)
        sizes = dict(num_labels=1, num_key_value_heads=2, pad_token_id=2, **trainers.SIZES)
        model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes))
    if kind == "DPO":
        given["ref_model"] = trainers.make_llama()
        model.warnings_issued = {}  # which TRL 0.24 asks for
    settings = {"max_length": 32, "gradient_checkpointing": False, "bf16": False, **settings}
    args = trainers.arguments(folder, config, **settings)
    if ours is not None:
        made, given["adaptive"] = adaptive(made), ours
    return made(model, args=args, processing_class=make_tokenizer(), **given)


def apart(one: Any, other: Any) -> tuple[float, float]:
    """Return the largest difference of the losses that two trainers have logged, and of their weights."""
    pairs = zip(trainers.losses(one), trainers.losses(other), strict=True)
    losses = max(abs(mine["loss"] - theirs["loss"]) for mine, theirs in pairs)
    expected = trainers.weights(other)
    return losses, max(float((value - expected[name]).abs().max()) for name, value in trainers.weights(one).items())


def main() -> None:
    """Print a table of what is installed."""
    torch.set_num_threads(1)
    print("| trainer | micro_batch_size | losses | weights | padding | out of memory, run again | seconds |")
    print("|---|---|---|---|---|---|---|")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                stock = make(kind, folder, None)
            except RuntimeError as error:
                print(f"| {kind} | does not import: {str(error).splitlines()[0]} |")
                continue
            stock.train()
            for size, most_tokens in (("auto", 10**9), (2, 10**9), (4, 60)):
                ours, start = make(kind, folder, AdaptiveArguments(micro_batch_size=size)), time.monotonic()
                trainers.OutOfMemory(ours.model, most_tokens)
                with without_pages(), all_that_fits():  # which take other processes, and time
                    ours.train()
                losses, weights = apart(ours, stock)
                padding = max((each["padding"] for each in trainers.losses(ours) if "padding" in each), default=None)
                print(
                    f"| {kind} | {size} | {losses:.1e} | {weights:.1e} | "
                    f"{'-' if padding is None else format(padding, '.2f')} | {ours.adaptive.num_recoveries} times | "
                    f"{time.monotonic() - start:.1f} |"
                )


if __name__ == "__main__":
    main()
