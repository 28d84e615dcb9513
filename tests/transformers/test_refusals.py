"""What cannot be trained in parts is refused in one line, with the name that its user knows, before any step."""

from __future__ import annotations

import contextlib
import inspect
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from adaptive_batching import ConfigError, DoesNotFitError
from adaptive_batching._transformers import older_versions
from adaptive_batching._transformers.refusals import check_trainer
from adaptive_batching.transformers import AdaptiveArguments, adaptive
from tests.transformers import architectures, trainers
from tests.transformers.trainers import make_trainer

THREE = AdaptiveArguments(micro_batch_size=3)


class WithoutItems:
    def __len__(self) -> int:
        return 8


class WithoutLength:
    def __getitem__(self, index: int) -> Any:
        return trainers.make_data(8)[index]


class Empty(list[Any]):
    def __bool__(self) -> bool:
        return True


class CountsBatches(transformers.Trainer):  # type: ignore[misc, name-defined]
    def get_batch_samples(self, *args: Any) -> Any:
        batches, _ = super().get_batch_samples(*args)
        return batches, torch.tensor(len(batches))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"data": WithoutLength(), "max_steps": 2},
            "train_dataset is a WithoutLength, which has no length; give a map-style data set, .*or a stream that is a",
        ),
        ({"data": WithoutItems()}, "train_dataset is a WithoutItems, which has a length and no items; give a map"),
        ({"data": Empty()}, "train_dataset is a Empty, which has no samples"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True starts again with fewer samples; set it to False"),
        (
            {"train_sampling_strategy": "batch_rebalance"},
            "train_sampling_strategy='batch_rebalance' makes batches of its own; set it to 'random'",
        ),
        ({"optim": "lomo"}, "optim='lomo' updates weights in the backward pass"),
        ({"accelerator_config": {"split_batches": True}}, r"accelerator_config\.split_batches=True cuts batches"),
    ],
)
def test_what_cannot_be_used_with_it_is_refused_in_one_line(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_trainer(tmp_path, THREE, **settings)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_used_with_it_trains_with_none_set(tmp_path: Path) -> None:
    make_trainer(tmp_path, AdaptiveArguments(), kind=CountsBatches, max_steps=2).train()


@pytest.mark.parametrize("other", [1, "cpu"])
def test_a_model_in_several_places_is_refused(other: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.model.hf_device_map = {"model.embed_tokens": 0, "model.layers": other}
    with pytest.raises(ConfigError, match=r"device_map has put layers of the model on GPU 0 and (GPU 1|cpu), of which"):
        check_trainer(trainer)


@pytest.mark.parametrize("place", ["cpu", torch.device("cpu")])
def test_a_model_that_a_device_map_puts_in_one_place_trains(place: Any, tmp_path: Path) -> None:
    model = trainers.make_llama()
    model.hf_device_map = {"": place}
    make_trainer(tmp_path, THREE, model=model, max_steps=1).train()


def test_a_model_that_is_parallel_by_its_own_means_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trainers.make_llama()
    model.is_parallelizable = model.model_parallel = True
    model.model.norm.to("meta")
    monkeypatch.setattr(transformers.Trainer, "_move_model_to_device", lambda *given: None)
    with pytest.raises(ConfigError, match="layers of the model on cpu and meta, of which"):
        make_trainer(tmp_path, THREE, model=model)


class PassesOn(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Has methods of its own that do what those of ``Trainer`` do, as trainers of some frameworks."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return super()._prepare_inputs(inputs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        return batches, self._get_num_items_in_batch(batches, device)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        return super()._inner_training_loop(*args, **kwargs)


class OwnLoop(transformers.Trainer):  # type: ignore[misc, name-defined]
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        return None


def test_methods_that_do_as_trainers_do_are_no_reason_to_refuse(tmp_path: Path) -> None:
    made = [trainers.trained(tmp_path, each, kind=PassesOn, max_steps=2) for each in (THREE, None)]
    trainers.assert_alike(*made)


def test_a_library_may_put_its_copy_of_the_loop_in_place_of_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = textwrap.dedent(inspect.getsource(transformers.Trainer._inner_training_loop))
    names = {**vars(inspect.getmodule(transformers.Trainer)), "__name__": "unsloth"}
    exec(source, names)
    monkeypatch.setattr(transformers.Trainer, "_inner_training_loop", names["_inner_training_loop"])
    assert transformers.Trainer._inner_training_loop.__module__ == "unsloth"
    trainers.trained(tmp_path, THREE, max_steps=1)


def test_methods_that_do_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="OwnLoop has a _inner_training_loop of its own, which does not call"):
        make_trainer(tmp_path, THREE, kind=OwnLoop)
    with pytest.raises(ConfigError, match=r"CountsBatches has a get_batch_samples of its own, .*compute_loss_func"):
        trainers.trained(tmp_path, THREE, kind=CountsBatches)


class Loads(transformers.Trainer):  # type: ignore[misc, name-defined]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("it loads a model")


class Generates(Loads):
    def _prepare_inputs(self, inputs: Any) -> Any:
        return inputs


class AsyncGRPOTrainer(Loads):
    """It has the name of one of TRL's."""


class DPOTrainer(Loads):
    """So has this one."""


@dataclass
class WithLoss(transformers.TrainingArguments):  # type: ignore[misc, name-defined]
    loss_type: str = "aot"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Generates, "Generates makes its batches while training, .*train without adaptive"),
        (AsyncGRPOTrainer, "AsyncGRPOTrainer makes its batches while training, .*train without adaptive"),
        (DPOTrainer, "loss_type='aot' of DPOTrainer compares samples"),
    ],
)
def test_a_class_that_cannot_be_split_is_refused_before_it_loads_a_model(kind: Any, said: str, tmp_path: Path) -> None:
    args = WithLoss(output_dir=str(tmp_path))
    for given, named in ((None, args), {}), ((None,), {"args": args}):
        with pytest.raises(ConfigError, match=said) as caught:
            adaptive(kind)(*given, **named, adaptive=THREE)
        assert "\n" not in str(caught.value)
    with pytest.raises(AssertionError, match="loads a model"):
        adaptive(kind)(None, args, adaptive=AdaptiveArguments())


@pytest.mark.parametrize(
    ("plugin", "mesh", "said"),
    [
        ({"fsdp_version": 1, "sync_module_states": False}, {}, "FSDP1 leaves ranks waiting .*set fsdp_config="),
        ({"fsdp_version": 2, "cpu_offload": True}, {}, "cpu_offload=True steps the optimizer on the host; set it to"),
        ({"fsdp_version": 2}, {"dp_replicate_size": 2}, "dp_replicate_size=2 sums gradients in a second collective"),
    ],
    ids=str,
)
def test_what_leaves_ranks_waiting_is_refused_in_one_line(
    plugin: dict[str, Any], mesh: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    trainer = make_trainer(tmp_path)
    check_trainer(trainer)
    state = trainer.accelerator.state
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    monkeypatch.setattr(state, "fsdp_plugin", FullyShardedDataParallelPlugin(**plugin), raising=False)
    monkeypatch.setattr(state, "parallelism_config", ParallelismConfig(**mesh) if mesh else None, raising=False)
    with pytest.raises(ConfigError, match=said) as caught:
        check_trainer(trainer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("is_fsdp_xla_enabled", True, "a TPU compiles a step as a whole.*FSDP2"),
        ("is_deepspeed_enabled", True, "DeepSpeed shards a model its own way; train .* with DDP .*or FSDP2"),
        ("is_distributed_loading_by_transformers", True, "from_pretrained has sharded .*set fsdp=True"),
        ("get_tp_size", lambda: 2, "tensor parallelism has collectives within each layer; train"),
        ("get_cp_size", lambda: 2, "context parallelism has collectives within each layer; train"),
    ],
)
def test_other_ways_to_train_on_several_devices_are_refused(
    attribute: str, value: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(trainer, attribute, value)
    with pytest.raises(ConfigError, match=said):
        check_trainer(trainer)


def test_a_loss_that_balances_experts_over_a_batch_is_refused(tmp_path: Path) -> None:
    model = architectures.make("Mixtral")
    model.config.output_router_logits = True
    with pytest.raises(ConfigError, match=r"output_router_logits=True .* set it to False in the model's config"):
        make_trainer(tmp_path, THREE, model=model)


def test_a_version_without_what_it_takes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older_versions, "_VERSION", Version("4.56.2"))
    with pytest.raises(ConfigError, match=r"4\.56\.2 is too old: pip install 'transformers>=4\.57'"):
        make_trainer(tmp_path, THREE)


def test_a_loss_that_is_not_finite_before_training_is_told(tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, THREE)
    torch.nn.init.constant_(ours.model.lm_head.weight, math.nan)
    with pytest.raises(ConfigError, match="is not finite before training"):
        ours.train()


def test_a_model_that_takes_one_sample_at_a_time_is_refused(tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size="auto"))
    forward = ours.model.forward

    def of_one(*args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        if len(input_ids) > 1:
            raise RuntimeError("shapes differ")
        return forward(*args, input_ids=input_ids, **kwargs)

    ours.model.forward = of_one
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM runs one sample, but not two, in a forward pass \(shapes differ\)"
    ):
        ours.train()


class Reads(torch.nn.Module):
    """A model that looks at its values, which a trace has none of; a long sample may not fit."""

    def __init__(self, most_tokens: int) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding(trainers.VOCABULARY, 1)
        self._most_tokens = most_tokens

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
        if torch.is_grad_enabled() and input_ids.shape[1] > self._most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        scores = self.weights(input_ids)[..., 0]  # [b, s]
        assert scores.detach().numpy().max() < 1e9
        return {"loss": (scores * labels.ne(-100)).sum() / labels.ne(-100).sum()}


@pytest.mark.parametrize("fits", [True, False])
def test_a_model_that_leaves_torch_for_numpy_is_probed(*, fits: bool, tmp_path: Path) -> None:
    ours = make_trainer(tmp_path, AdaptiveArguments(micro_batch_size="auto"), model=Reads(99 if fits else 20))
    with contextlib.nullcontext() if fits else pytest.raises(DoesNotFitError):
        trainers.prepared(ours)
