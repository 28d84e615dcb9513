"""What differs between versions of transformers and TRL: trained as stock by each, or refused.

`make test-stacks` runs this file, and others, at the oldest versions and at those that axolotl pins.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch.nn import functional as F

from adaptive_batching import ConfigError
from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.transformers import strangers, trainers

HERE = Version(transformers.__version__)


@pytest.fixture(params=["auto", 3])
def ours(request: pytest.FixtureRequest) -> AdaptiveArguments:
    return AdaptiveArguments(micro_batch_size=request.param)


def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of whoever does not look at ``num_items_in_batch``."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_mean_in_compute_loss_func_trains_as_stock(tmp_path: Path, ours: AdaptiveArguments) -> None:
    made = [trainers.trained(tmp_path, each, compute_loss_func=mean, max_steps=4) for each in (ours, None)]
    trainers.assert_alike(*made)


def test_accumulated_batches_train_as_stock(tmp_path: Path, ours: AdaptiveArguments) -> None:
    settings = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4)
    trainers.assert_alike(*(trainers.trained(tmp_path, each, **settings) for each in (ours, None)))


def test_a_term_beside_the_sum_over_all_targets_trains_as_stock_or_is_refused(tmp_path: Path) -> None:
    def make(ours: AdaptiveArguments | None) -> Any:
        return trainers.trained(tmp_path, ours, kind=strangers.DecayedTrainer, max_steps=3)

    if Version("5.16") <= HERE:
        trainers.assert_alike(make(AdaptiveArguments(micro_batch_size=3)), make(None))
    else:  # which counts the first label of a row, although it is no target
        with pytest.raises(ConfigError, match="times as large where Trainer passes num_items_in_batch"):
            make(AdaptiveArguments(micro_batch_size=3))


def test_rotary_frequencies_that_follow_the_longest_sequence_are_refused_where_they_stay(tmp_path: Path) -> None:
    said = "rope_type='dynamic' follows" if Version("5.16") > HERE else "computes over the batch or its padding"
    with pytest.raises(ConfigError, match=said):
        trainers.trained(tmp_path, AdaptiveArguments(micro_batch_size=3), model=strangers.dynamic_rope())


def ids(chance: random.Random, most: int) -> list[int]:
    return [chance.randrange(3, trainers.VOCABULARY) for _ in range(chance.randrange(3, most))]


def of_trl(kind: str, folder: Path, ours: AdaptiveArguments | None, **more: Any) -> Any:
    """Return a trainer of TRL's, trained for three steps; its data are tokens already in SFT, texts otherwise."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset

    from tests.transformers.test_trl import make_tokenizer

    try:
        made, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    except RuntimeError as error:  # TRL 0.24 takes packages to be there that are not
        pytest.skip(f"TRL {trl.__version__} with transformers {HERE}: {error}")
    chance, given = random.Random(0), {}
    if kind == "SFT":
        given["train_dataset"] = Dataset.from_list([{"input_ids": ids(chance, 24)} for _ in range(24)])
    else:
        rows = [
            {key: " ".join(f"w{i}" for i in ids(chance, 12)) for key in ("prompt", "chosen", "rejected")}
            for _ in range(24)
        ]
        given["train_dataset"] = Dataset.from_list(rows)
    model = trainers.make_llama()
    if kind == "Reward":
        given["train_dataset"] = given["train_dataset"].remove_columns("prompt")
        torch.manual_seed(0)
        sizes = dict(num_labels=1, num_key_value_heads=2, pad_token_id=2, **trainers.SIZES)
        model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes))
    if kind == "DPO":
        given["ref_model"] = trainers.make_llama()
        model.warnings_issued = {}  # which TRL 0.24 asks for
    settings = dict(max_length=32, max_steps=3, gradient_checkpointing=False, bf16=False, **more)
    args = trainers.arguments(folder, config, **settings)
    if ours is not None:
        made, given["adaptive"] = adaptive(made), ours
    trainer = made(model, args=args, processing_class=make_tokenizer(), **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward"])
def test_a_trainer_of_trl_trains_as_stock(tmp_path: Path, kind: str) -> None:
    found, expected = of_trl(kind, tmp_path, AdaptiveArguments(micro_batch_size=3)), of_trl(kind, tmp_path, None)
    trainers.assert_alike(found, expected)
    if kind == "SFT":  # DPO's is over the tokens of both answers, of which parts are no whole
        trainers.assert_alike(found, expected, 1e-4, keys=("mean_token_accuracy", "num_tokens"))


def test_means_of_pairs_are_not_said_to_be_added_up_where_trainer_divides_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    ours = [AdaptiveArguments(micro_batch_size=3), None]
    trainers.assert_alike(*(of_trl("Reward", tmp_path, each, **settings) for each in ours))
    assert "adds up the means" not in caplog.text
