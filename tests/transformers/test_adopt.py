"""A trainer that is there already becomes adaptive: by ``adopt``, by a callback, and by ``adaptive-batching run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from adaptive_batching import ConfigError
from adaptive_batching._transformers.run_command import parsed
from adaptive_batching.transformers import AdaptiveArguments, AdaptiveCallback, adaptive, adopt
from tests.conftest import ROOT
from tests.transformers import trainers
from tests.transformers.trainers import OutOfMemory, assert_alike, assert_same, make_trainer, trained

THREE: dict[str, Any] = {"micro_batch_size": 3}


def computes_over_the_batch(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return 2 * outputs.logits.flatten().logsumexp(0)


def test_an_adopted_trainer_trains_as_one_of_an_adaptive_class_and_recovers(tmp_path: Path) -> None:
    adopted, made = make_trainer(tmp_path), make_trainer(tmp_path, AdaptiveArguments(**THREE))
    assert adopt(adopted, THREE) is adopted
    assert isinstance(adopted, transformers.Trainer) and type(adopted) is adaptive(transformers.Trainer)
    faults = [OutOfMemory(trainer.model, most_tokens=40) for trainer in (adopted, made)]
    for trainer in (adopted, made):
        trainer.train()
    assert_same(adopted, made)
    assert faults[0].failures > 0
    assert_alike(adopted, trained(tmp_path))


def test_a_train_that_the_trainer_itself_has_runs_inside_of_ours(tmp_path: Path) -> None:
    """As unsloth wraps that of each trainer which it makes."""
    trainer, calls = make_trainer(tmp_path), []
    stock = trainer.train

    def train(*args: Any, **kwargs: Any) -> Any:
        calls.append(trainer.adaptive)
        return stock(*args, **kwargs)

    trainer.train = train
    adopt(trainer, THREE).train()
    assert calls == [trainer.adaptive] and calls[0] is not None
    assert_alike(trainer, trained(tmp_path))


def test_what_cannot_be_adopted_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    assert adopt(trainer, AdaptiveArguments()) is trainer and type(trainer) is transformers.Trainer
    with pytest.raises(ConfigError, match="adaptive has no setting 'micro_batch'"):
        adopt(trainer, {"micro_batch": 3})
    with pytest.raises(ConfigError, match="'auto', AdaptiveArguments"):
        adopt(trainer, "automatic")
    with pytest.raises(TypeError, match=r"takes a transformers\.Trainer"):
        adopt(object())  # type: ignore[type-var]
    assert type(trainer) is transformers.Trainer
    adopt(trainer, THREE)
    with pytest.raises(ConfigError, match="is adaptive already"):
        adopt(trainer, THREE)
    lomo = make_trainer(tmp_path, auto_find_batch_size=True)
    with pytest.raises(ConfigError, match="auto_find_batch_size=True starts again"):
        adopt(lomo, THREE)
    assert type(lomo) is transformers.Trainer


def test_where_it_is_not_possible_a_trainer_trains_as_stock_and_one_line_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = dict(compute_loss_func=computes_over_the_batch, max_steps=3)
    trainer = adopt(make_trainer(tmp_path / "ours", **settings), THREE, only_if_possible=True)
    trainer.train()
    [line] = [record for record in caplog.records if "without adaptive batching" in record.getMessage()]
    assert line.levelname == "WARNING" and "parts of a batch do not add up" in line.getMessage()
    assert trainer.adaptive is None  # type: ignore[attr-defined]
    assert_same(trainer, trained(tmp_path / "stock", **settings))
    assert not (tmp_path / "ours" / "adaptive_batching").exists()


def test_where_it_is_possible_a_trainer_adopted_so_trains_the_same_and_resumes(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(save_strategy="steps", save_steps=2, max_steps=4, lr_scheduler_type="constant")
    whole = adopt(make_trainer(tmp_path, **settings), THREE, only_if_possible=True)
    whole.train()
    assert_alike(whole, trained(tmp_path / "stock", **{**settings, "save_strategy": "no"}))
    rest = adopt(make_trainer(tmp_path, **settings), THREE, only_if_possible=True)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(rest, whole, trainers.losses)


def test_a_callback_adopts_the_trainer_that_it_is_given_to(tmp_path: Path) -> None:
    callback = AdaptiveCallback(THREE)
    ours = [trained(tmp_path, callbacks=[callback], max_steps=3) for _ in range(2)]  # one callback, two trainers
    made = trained(tmp_path, AdaptiveArguments(**THREE), max_steps=3)
    for trainer in ours:
        assert trainer.adaptive is not None
        assert_same(trainer, made)
    off = trained(tmp_path, callbacks=[AdaptiveCallback(AdaptiveArguments())], max_steps=1)
    assert type(off) is transformers.Trainer


def test_a_callback_that_comes_too_late_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.add_callback(AdaptiveCallback(THREE))
    with pytest.raises(ConfigError, match=r"give it to the trainer when it is made .* or call adopt"):
        trainer.train()


SCRIPT = """
import json, sys
from tests.conftest import without_pages
from tests.transformers import trainers
folder, what = sys.argv[1:]
with without_pages():
    settings = {"auto_find_batch_size": True} if what == "refused" else {}
    trainer = trainers.trained(folder, max_steps=2, **settings)
    found = [sum(float(v.double().sum()) for v in trainer.model.state_dict().values()), trainers.losses(trainer)]
print(json.dumps([[each.__name__ for each in type(trainer).__mro__], found]))
"""


def run_command(*command: str, **environment: str) -> Any:
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    run = [sys.executable, "-m", "adaptive_batching", "run", *command]
    return subprocess.run(run, env=given, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.wide
def test_a_command_trains_adaptively_or_as_it_would_with_a_line_that_says_why(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    training = (sys.executable, str(script), str(tmp_path / "out"))
    found = run_command("--settings", "micro_batch_size=3", "--", *training, "adaptive")
    assert found.returncode == 0, found.stderr
    assert "adaptive-batching run: Trainer is adaptive (micro_batch_size=3)" in found.stderr
    bases, (weights, losses) = json.loads(found.stdout.splitlines()[-1])
    assert "AdaptiveTraining" in bases
    stock = trained(tmp_path / "stock", max_steps=2)
    assert losses[0]["loss"] == pytest.approx(trainers.losses(stock)[0]["loss"], rel=1e-6)
    assert weights == pytest.approx(sum(float(v.double().sum()) for v in trainers.weights(stock).values()), rel=1e-6)

    refused = run_command("--", *training, "refused")
    assert refused.returncode == 0, refused.stderr
    assert "Trainer trains without adaptive batching: auto_find_batch_size=True" in refused.stderr
    assert "AdaptiveTraining" not in json.loads(refused.stdout.splitlines()[-1])[0]


OF_TWO = """
import json, os, sys
from tests.conftest import without_pages
from tests.transformers import trainers
with without_pages():
    trainer = trainers.trained(sys.argv[1], max_steps=2, ddp_backend="gloo")
if os.environ["RANK"] == "0":
    print(json.dumps([trainer.args.world_size, type(trainer).__mro__[1].__name__, trainers.losses(trainer)]))
"""


@pytest.mark.slow
def test_a_command_of_two_processes_trains_as_one_does_with_twice_the_batch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OF_TWO)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    settings = ("--settings", "micro_batch_size=3")
    found = run_command(*settings, "--", *torchrun, str(script), str(tmp_path / "out"))
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("adaptive-batching run: Trainer is adaptive (micro_batch_size=3)") == 1
    lines = [line for line in found.stdout.splitlines() if line.startswith("[2")]
    size, base, losses = json.loads(lines[-1])
    assert (size, base) == (2, "AdaptiveTraining")
    stock = trainers.losses(trained(tmp_path / "stock", max_steps=2, per_device_train_batch_size=16))
    for ours, theirs in zip(losses, stock, strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["--"], "the command is missing: write it after --"),
        (["--settings", "micro_batch_size", "--", "true"], "'micro_batch_size' has no value"),
        (["--settings", "micro_batch=3", "--", "true"], "did you mean 'micro_batch_size'"),
        (["--settings", "memory_limit=40GiB", "--", "true"], "has no effect by itself"),
        (["--settings", "{bad", "--", "true"], "this is no JSON"),
        (["--settings", "padding=false", "--", "true"], "changes nothing"),
        (["--", "no-such-command"], "error: no-such-command: No such file"),
    ],
)
def test_a_mistake_in_run_is_named_in_one_line(command: list[str], said: str) -> None:
    found = run_command(*command)
    assert found.returncode == 2 and said in found.stderr and found.stderr.count("\n") == 1, found.stderr


def test_a_sitecustomize_of_the_user_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('of the user')")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    found = run_command("--", sys.executable, "-c", "print('the command')", PYTHONPATH=paths)
    assert found.stdout.splitlines()[-2:] == ["of the user", "the command"]


def test_settings_on_the_command_line_are_as_they_are_in_python() -> None:
    text = "micro_batch_size=auto,memory_limit=40GiB,balance_ranks=false,audit_every=10,headroom=0.5"
    expected = {"micro_batch_size": "auto", "memory_limit": "40GiB", "balance_ranks": False, "audit_every": 10}
    assert parsed(text) == {**expected, "headroom": 0.5}
    assert parsed("auto") == "auto"
    assert parsed('{"batch_increase_function": {"_component_": "a.b", "x": 1}}') == {
        "batch_increase_function": {"_component_": "a.b", "x": 1}
    }
