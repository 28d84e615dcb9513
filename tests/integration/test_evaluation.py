"""Evaluation through EleutherAI's harness: the largest batch, whose results are those of a batch of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from adaptive_batching._loop.auto_batcher import AutoBatcher
from adaptive_batching._probe.does_not_fit import DoesNotFitError
from adaptive_batching._torchtune.stock.loading import any_version_of_the_harness, load_stock, replaced_in
from adaptive_batching._torchtune.train.evaluating import BatchesThatFit
from tests.support.harness import DOCUMENTS, TASKS, evaluation_config, make_harness_inputs, task_manager

pytest.importorskip("lm_eval", reason="lm_eval is not installed (the extra eval)")
pytestmark = pytest.mark.xdist_group("harness")  # which takes seconds to import

LARGEST = {"use_maximum_batch_size": True, "adaptive_batching": {"memory_limit": "6GiB", "max_batch_size": 16}}
PARTS_WITH_IMAGES = {"model": "model", "checkpointer": "checkpointer"}
STOPS = [*range(7, 700, 23)]  # end what is generated, each row after another number of tokens

Responses = dict[str, list[Any]]
Make = Callable[..., "Evaluation"]


@pytest.fixture(scope="module")
def folder(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    make_harness_inputs(folder, inputs)
    return folder


class Evaluation:
    """A recipe that has been set up, and the sizes of the forwards that it runs."""

    def __init__(self, recipe: Any, cfg: DictConfig) -> None:
        self.recipe = recipe
        recipe.setup(cfg)
        self.stock = load_stock("eleuther_eval")
        self.wrapper = recipe.eleuther_model_wrapper
        if isinstance(self.wrapper, self.stock._LLMEvalWrapper):
            self.wrapper._tokenizer.stop_tokens = STOPS
            # A character for each token, of which a real text would hide some.
            self.wrapper._tokenizer.decode = lambda tokens: "".join(chr(0x4E00 + token) for token in tokens)
        self.rows: list[int] = []
        self.wrapper.model.register_forward_pre_hook(lambda _, inputs: self.rows.append(len(inputs[0])))

    def responses(self) -> Responses:
        """Evaluate, and return what the model answered to each request of each task."""
        from lm_eval.utils import make_table

        found: list[Any] = []

        def keep(output: dict[str, Any]) -> str:
            found.append(output)
            return make_table(output)

        with replaced_in(self.stock, make_table=keep):
            self.recipe.evaluate()
        return {task: [sample["resps"] for sample in found[0]["samples"][task]] for task in self.recipe.tasks}


@pytest.fixture(scope="module")
def evaluation(folder: Path, inputs: Path) -> Iterator[Make]:
    """``evaluation(of_stock=False, **config)``: a recipe, which generates few tokens."""
    from recipes.eleuther_eval import EleutherEvalRecipe

    stock = EleutherEvalRecipe.stock

    def make(*, of_stock: bool = False, **changes: Any) -> Evaluation:
        cfg = OmegaConf.create({**evaluation_config(folder, inputs), **changes})
        with any_version_of_the_harness() if of_stock else contextlib.nullcontext():
            recipe = (stock.EleutherEvalRecipe if of_stock else EleutherEvalRecipe)(cfg)
        return Evaluation(recipe, cfg)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(stock._LLMEvalWrapper, "max_gen_toks", 24)
        patch.setattr(stock, "TaskManager", task_manager)
        yield make


@pytest.fixture(scope="module")
def one_by_one(evaluation: Make) -> Responses:
    """Results of stock with a batch of one."""
    return evaluation(of_stock=True, batch_size=1).responses()


def assert_same(ours: Responses, theirs: Responses) -> None:
    """Equal texts, and log-likelihoods that are equal up to rounding."""
    assert ours.keys() == theirs.keys()
    for task, answers in theirs.items():
        assert len(ours[task]) == len(answers) == DOCUMENTS
        for ours_of_document, theirs_of_document in zip(ours[task], answers, strict=True):
            for [here], [there] in zip(ours_of_document, theirs_of_document, strict=True):
                if isinstance(there, str):
                    assert here == there
                elif isinstance(there, tuple):
                    assert here == (pytest.approx(there[0], rel=1e-5), there[1])
                else:
                    assert here == pytest.approx(there, rel=1e-5)


def test_with_the_field_unset_it_is_stock_bit_for_bit(evaluation: Make) -> None:
    ours, stock = evaluation(), evaluation(of_stock=True)
    assert ours.responses() == stock.responses()
    assert ours.rows == stock.rows


def test_the_largest_batch_gives_the_results_of_a_batch_of_one(evaluation: Make, one_by_one: Responses) -> None:
    largest = evaluation(**LARGEST)
    assert_same(largest.responses(), one_by_one)
    assert max(largest.rows) == 16
    assert len({len(text) for [[text]] in one_by_one["small_answers"]}) > 3, "rows end after other numbers of tokens"


class Room:
    """A device that has room for so many rows, once it is short of memory."""

    def __init__(self, rows: int, *, is_short: bool = False) -> None:
        self.rows, self.is_short, self.failures = rows, is_short, 0

    def take(self, rows: int) -> None:
        if self.is_short and rows > self.rows:
            self.failures += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory: {rows} rows")

    def short_after_each_probe(self) -> Any:
        find = BatchesThatFit._rows_that_fit

        def find_in_plenty(wrapper: BatchesThatFit, *arguments: Any) -> AutoBatcher:
            self.is_short = False
            found = find(wrapper, *arguments)
            self.is_short = True
            return found

        return mock.patch.object(BatchesThatFit, "_rows_that_fit", find_in_plenty)


def in_a_forward(of: Evaluation, room: Room, patch: pytest.MonkeyPatch) -> None:
    of.wrapper.model.register_forward_pre_hook(lambda _, inputs: room.take(len(inputs[0])))


def before(owner: Any, name: str, room: Room, patch: pytest.MonkeyPatch) -> None:
    function = getattr(owner, name)

    def taking_room(of_rows: Any, *arguments: Any, **kwargs: Any) -> Any:
        room.take(of_rows if isinstance(of_rows, int) else len(of_rows))
        return function(of_rows, *arguments, **kwargs)

    patch.setattr(owner, name, taking_room)


def after_a_forward(of: Evaluation, room: Room, patch: pytest.MonkeyPatch) -> None:
    """In what the harness makes of the logits."""
    before(torch.nn.functional, "log_softmax", room, patch)


def in_the_caches(of: Evaluation, room: Room, patch: pytest.MonkeyPatch) -> None:
    """When the first layer has its cache of keys and values, and the second has none."""
    before(of.wrapper.model.layers[1], "setup_caches", room, patch)


def in_the_tenth_token(of: Evaluation, room: Room, patch: pytest.MonkeyPatch) -> None:
    generated: list[int] = []

    def count(_: Any, inputs: tuple[torch.Tensor]) -> None:
        generated.append(1) if inputs[0].shape[1] == 1 else generated.clear()
        if len(generated) == 10:
            room.take(len(inputs[0]))

    of.wrapper.model.register_forward_pre_hook(count)


GENERATING = ["small_answers", "small_lines"]


@pytest.mark.parametrize(
    ("runs_out", "tasks"),
    [
        (in_a_forward, [*TASKS]),
        (after_a_forward, ["small_choices", "small_letters", "small_texts"]),
        (in_the_caches, GENERATING),
        (in_the_tenth_token, GENERATING),
    ],
)
def test_a_batch_that_runs_out_of_memory_gives_the_same_results_in_parts(
    evaluation: Make, one_by_one: Responses, runs_out: Any, tasks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    largest, room = evaluation(**LARGEST, tasks=tasks), Room(rows=3)
    runs_out(largest, room, monkeypatch)
    with room.short_after_each_probe():
        assert_same(largest.responses(), {task: one_by_one[task] for task in tasks})
    assert room.failures > 0


def test_with_the_field_unset_a_batch_that_does_not_fit_runs_in_parts(
    evaluation: Make, one_by_one: Responses, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unset = evaluation()
    in_a_forward(unset, Room(rows=3, is_short=True), monkeypatch)
    assert_same(unset.responses(), one_by_one)
    assert "out of memory with batch_size=8; running the requests again, at most 4 at a time" in caplog.text


@pytest.mark.parametrize(
    ("config", "rows", "message"),
    [
        (LARGEST, 0, r"1 row of up to \d+ tokens.*set max_seq_length below 512"),
        ({"adaptive_batching": {"recover_from_oom": False}}, 3, "out of memory with batch_size=8; set a smaller one"),
    ],
)
def test_memory_that_runs_out_for_good_ends_the_evaluation(
    config: dict[str, Any], rows: int, message: str, evaluation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, room = evaluation(**config, tasks=["small_letters"]), Room(rows, is_short=True)
    in_a_forward(made, room, monkeypatch)
    with room.short_after_each_probe(), pytest.raises(DoesNotFitError, match=message):
        made.recipe.evaluate()
    assert not made.wrapper.model.caches_are_setup()


def test_a_model_that_reads_images_keeps_its_batch(evaluation: Make, caplog: pytest.LogCaptureFixture) -> None:
    parts = {key: {"_component_": f"tests.support.vision.{value}"} for key, value in PARTS_WITH_IMAGES.items()}
    sees = evaluation(**LARGEST | parts | {"batch_size": 1})
    assert "use_maximum_batch_size=True does nothing for a model that reads images" in caplog.text
    assert sees.wrapper.batch_size == 1
