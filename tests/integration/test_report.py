"""Files of a real run: a record as documented, a page that equals it, and metrics in the logger of the config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adaptive_batching._report.events import read_events
from adaptive_batching._report.page import write_page
from adaptive_batching._torchtune.train.run import TrainingLoop
from tests import conftest
from tests.conftest import Run, TuneRun
from tests.integration.faults import disarm, plan
from tests.support.html import check_that_it_asks_for_nothing, read_page
from tests.support.records import check_the_schema, metrics_of_the_page

GROW = [
    "batch_increase_function._component_=adaptive_batching.growth.fixed_increase", "batch_increase_function.increase=4",
    "~batch_increase_function.every", "model._component_=tests.integration.faults.full_model",
]  # fmt: skip
PROBED = ["use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB", "adaptive_batching.max_batch_size=8"]


@pytest.fixture
def one_failure(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the fifth forward of training run out of memory."""
    train = TrainingLoop.run

    def armed(loop: TrainingLoop) -> None:
        plan.update(where="backward", layer=0, calls=0, call=5, times=1)
        train(loop)

    disarm()
    plan.update(call=2**40)
    monkeypatch.setattr(TrainingLoop, "run", armed)
    yield
    disarm()


@pytest.mark.usefixtures("one_failure")
def test_a_run_leaves_a_record_and_a_page_that_say_what_tensorboard_gets(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "makes_pages", True)
    logger = {
        "_component_": "torchtune.training.metric_logging.TensorBoardLogger", "log_dir": "${output_dir}/logs",
        "api_key": "hunter2",
    }  # fmt: skip
    run = tune_run("full", *GROW, *PROBED, "my_Token=hunter2", replaced={"metric_logger": logger})
    folder = run.output_dir / "adaptive_batching"
    assert sorted(path.name for path in folder.iterdir()) == ["probe.json", "report.html", "report.jsonl"]
    assert not [path for path in folder.iterdir() if "hunter2" in path.read_text()], "secrets are left out"
    record = read_events(folder / "report.jsonl")
    assert record["run"][0]["config"]["metric_logger"]["api_key"] == "(masked)"
    check_the_page(folder, record)
    check_the_schema(record)
    check_the_metrics(logged_in(run.output_dir / "logs"), record)
    check_that_it_is_made_again(run)


def logged_in(folder: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step that TensorBoard has."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed (extra dev)"
    )
    [written] = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    read = reader.EventAccumulator(str(written), size_guidance={"tensors": 0})
    read.Reload()
    metrics: dict[int, dict[str, float]] = {}
    for name in read.Tags()["tensors"]:  # as stock writes numbers
        for event in read.Tensors(name):
            metrics.setdefault(event.step, {})[name] = event.tensor_proto.float_val[0]
    return metrics


def check_the_page(folder: Path, record: dict[str, Any]) -> None:
    page = read_page(folder / "report.html")
    check_that_it_asks_for_nothing(page)
    [drawn] = page.data["runs"]
    columns, steps = drawn["columns"], record["step"]
    assert columns["loss"] == pytest.approx([step["loss"] for step in steps], rel=1e-5)
    assert columns["batch"] == [step["samples"] for step in steps]
    assert columns["padding"] == pytest.approx([step["padded_tokens"] / step["tokens"] for step in steps], rel=1e-5)
    assert {"lr", "seconds", "memory"} <= set(columns) and len(drawn["recoveries"]) == 1
    assert page.facts["Out of memory"] == "once" and page.facts["Batch size"] == "4 → 8"
    assert "ended 20" in page.words["summary"]
    assert page.tables["recoveries"][0][1][2].startswith("with 4 samples of up to")
    assert {"probe", "steps", "checkpoints"} <= set(re.findall(r"(\w+) [\d.]+ s\b", page.words["summary"]))


def check_the_metrics(logged: dict[int, dict[str, float]], record: dict[str, Any]) -> None:
    """A logger gets what the record says, under the documented names."""
    epochs = {epoch["epoch"]: epoch["batch_size"] for epoch in record["epoch"]}
    ours = metrics_of_the_page()
    assert set(logged) == {step["step"] for step in record["step"]}
    for step in record["step"]:
        metrics = logged[step["step"]]
        assert metrics["loss"] == pytest.approx(step["loss"], rel=1e-6)
        assert metrics["lr"] == pytest.approx(step["lr"], rel=1e-6)
        assert metrics["batch_size"] == epochs[step["epoch"]] and metrics["global_batch_size"] == step["samples"]
        assert metrics["oom_retries"] == step["recoveries"]
        assert set(metrics) - ours <= {"loss", "lr", "grad_norm", "tokens_per_second_per_gpu"}
    assert ours <= set(logged[max(logged)]) and max(step["recoveries"] for step in record["step"]) == 1


def check_that_it_is_made_again(run: Run) -> None:
    page = run.output_dir / "adaptive_batching" / "report.html"
    before = page.read_text()
    page.unlink()
    assert write_page([run.output_dir]) == page and page.read_text() == before
