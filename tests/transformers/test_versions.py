"""What differs between versions of transformers and TRL: trained as stock by each, or refused.

`make test-stacks` runs this file, and others, at the oldest versions and at those that axolotl pins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from torch.nn import functional as F

from adaptive_batching import ConfigError
from adaptive_batching.transformers import AdaptiveArguments, adopt
from tests.support import versions
from tests.transformers import strangers, trainers

HERE = Version(transformers.__version__)


# With other versions they run all the same: `make test-stacks`.
pytestmark = pytest.mark.wide


@pytest.fixture(params=["auto", 3])
def ours(request: pytest.FixtureRequest) -> AdaptiveArguments:
    return AdaptiveArguments(micro_batch_size=request.param)


def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss of whoever does not look at ``num_items_in_batch``."""
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def assert_alike(found: Any, expected: Any) -> None:
    """Two trainers have logged the same, and have the same weights, up to rounding."""
    trainers.assert_alike(found, expected)
    assert versions.apart(found, expected)[1] < 1e-5


def test_a_mean_in_compute_loss_func_trains_as_stock(tmp_path: Path, ours: AdaptiveArguments) -> None:
    made = [trainers.trained(tmp_path, each, compute_loss_func=mean, max_steps=4) for each in (ours, None)]
    assert_alike(*made)


def test_accumulated_batches_train_evaluate_and_count_tokens_as_stock(tmp_path: Path, ours: AdaptiveArguments) -> None:
    settings: dict[str, Any] = dict(
        per_device_train_batch_size=4, gradient_accumulation_steps=3, num_train_epochs=2, data=trainers.make_data(26),
        eval_dataset=trainers.make_data(9), eval_strategy="epoch", include_num_input_tokens_seen="non_padding",
    )  # fmt: skip
    found, expected = (trainers.trained(tmp_path, each, **settings) for each in (ours, None))
    assert_alike(found, expected)
    assert tokens_seen(found) == tokens_seen(expected)
    logs = [run.state.log_history for run in (found, expected)]
    evaluated = [[each["eval_loss"] for each in log if "eval_loss" in each] for log in logs]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


def test_an_evaluation_that_runs_out_of_memory_gives_the_loss_of_stock(tmp_path: Path) -> None:
    found, expected = (
        trainers.make_trainer(tmp_path, each, eval_dataset=trainers.make_data(16))
        for each in (AdaptiveArguments(micro_batch_size=3), None)
    )
    short = trainers.OutOfMemory(found.model, 60, in_training=False)
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-6)
    assert short.failures


def tokens_seen(trainer: Any) -> list[int]:
    return [each["num_input_tokens_seen"] for each in trainers.losses(trainer)]


def test_tokens_are_counted_as_they_ran(tmp_path: Path) -> None:
    """With ``all``, padding counts, of which parts have less than batches."""
    settings: dict[str, Any] = dict(include_num_input_tokens_seen="all", num_train_epochs=1)
    if "include_tokens_per_second" in transformers.TrainingArguments.__dataclass_fields__:  # before 5
        settings["include_tokens_per_second"] = True
    sizes = AdaptiveArguments(micro_batch_size=1), AdaptiveArguments(micro_batch_size=8), None
    alone, together, stock = (trainers.trained(tmp_path, each, **settings) for each in sizes)
    tokens = sum(len(sample["input_ids"]) for sample in trainers.make_data())
    assert tokens == tokens_seen(alone)[-1] < tokens_seen(together)[-1] == tokens_seen(stock)[-1]


@pytest.mark.skipif(Version("5.3") <= HERE, reason="transformers shards there")
def test_a_model_that_is_to_be_sharded_is_refused_in_the_older_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainers.make_trainer(tmp_path)
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    with pytest.raises(ConfigError, match=r"FSDP2 needs transformers 5\.3 or later"):
        adopt(trainer, "auto")


class Looks(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Looks into the loader that callbacks get."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(kwargs["train_dataloader"])

    on_epoch_begin = on_train_begin


def test_callbacks_get_the_loader_of_batches(tmp_path: Path) -> None:
    looks = Looks()
    trainers.trained(tmp_path, AdaptiveArguments(micro_batch_size=3), callbacks=[looks], num_train_epochs=1)
    assert [type(next(iter(loader))) for loader in looks.seen] == [dict, dict]
    assert [len(loader) for loader in looks.seen] == [5, 5]


def test_a_run_goes_on_as_stock_does(tmp_path: Path) -> None:
    """Within an epoch, at its end, and within the next."""
    settings: dict[str, Any] = dict(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2, data=trainers.make_data(24),
    )  # fmt: skip
    both = {"stock": None, "ours": AdaptiveArguments(micro_batch_size=3)}
    for name, ours in both.items():
        trainers.trained(tmp_path / name, ours, save_strategy="steps", save_steps=1, **settings)
    for step in (1, 3, 4):
        made = [trainers.make_trainer(tmp_path / name, ours, **settings) for name, ours in both.items()]
        for name, trainer in zip(both, made, strict=True):
            trainer.train(resume_from_checkpoint=str(tmp_path / name / f"checkpoint-{step}"))
        assert_alike(made[1], made[0])


def test_a_term_beside_the_sum_over_all_targets_trains_as_stock_or_is_refused(tmp_path: Path) -> None:
    def make(ours: AdaptiveArguments | None) -> Any:
        return trainers.trained(tmp_path, ours, kind=strangers.DecayedTrainer, max_steps=3)

    if Version("5.16") <= HERE:
        assert_alike(make(AdaptiveArguments(micro_batch_size=3)), make(None))
    else:  # which counts the first label of a row, although it is no target
        with pytest.raises(ConfigError, match="times as large where Trainer passes num_items_in_batch"):
            make(AdaptiveArguments(micro_batch_size=3))


def test_rotary_frequencies_that_follow_the_longest_sequence_are_refused_where_they_stay(tmp_path: Path) -> None:
    said = "rope_type='dynamic' follows" if Version("5.16") > HERE else "uses statistics of the whole batch"
    with pytest.raises(ConfigError, match=said):
        trainers.trained(tmp_path, AdaptiveArguments(micro_batch_size=3), model=strangers.dynamic_rope())


def of_trl(kind: str, folder: Path, ours: AdaptiveArguments | None, **settings: Any) -> Any:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    try:
        trainer = versions.make(kind, folder, ours, **settings)
    except RuntimeError as error:  # TRL 0.24 takes packages to be there that are not
        pytest.skip(f"TRL {trl.__version__} with transformers {HERE}: {error}")
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward"])
def test_a_trainer_of_trl_trains_as_stock(tmp_path: Path, kind: str) -> None:
    expected = of_trl(kind, tmp_path, None)
    for size in ("auto", 2):
        found = of_trl(kind, tmp_path, AdaptiveArguments(micro_batch_size=size))
        assert_alike(found, expected)
        if kind == "SFT":  # DPO's is over the tokens of both answers, of which parts are no whole
            trainers.assert_alike(found, expected, 1e-4, keys=("mean_token_accuracy", "num_tokens"))


def test_means_of_pairs_are_not_said_to_be_added_up_where_trainer_divides_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    ours = [AdaptiveArguments(micro_batch_size=3), None]
    assert_alike(*(of_trl("Reward", tmp_path, each, **settings) for each in ours))
    assert "adds up the means" not in caplog.text
