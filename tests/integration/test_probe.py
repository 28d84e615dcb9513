"""The probe within real recipes, run through ``tune run``."""

from __future__ import annotations

import logging
import re
from functools import partial

import pytest

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._memory.meter import CpuMeter
from adaptive_batching._probe.does_not_fit import require_room
from adaptive_batching._step.forward_times import ForwardTimes
from adaptive_batching._torchtune.train.growing import what_keeps_global_batch
from adaptive_batching._values import ConfigError
from tests.conftest import TuneRun, assert_close, assert_same_weights
from tests.support.overrides import WIDE
from tests.support.records import events, without_sizes
from tests.support.wide import few

PROBE = ["use_maximum_batch_size=True", "adaptive_batching.memory_limit=8GiB"]
IN_BACKWARD = ["optimizer_in_bwd=True", "clip_grad_norm=null"]
PAGED = "optimizer._component_=bitsandbytes.optim.PagedAdamW8bit"
CASES = {
    "full": ("full",),
    "full-binary-search": ("full", "adaptive_batching.search=binary_search"),
    "full-accumulation": ("full", "gradient_accumulation_steps=2"),
    "full-optimizer-in-backward": ("full", *IN_BACKWARD),
    "full-packed": ("full", "dataset.packed=True"),
    "full-compile": ("full", "compile=True"),
    "full-paged-in-backward": ("full", PAGED, *IN_BACKWARD),
    # Without merging: on the cpu stock merges into the model that it goes on training.
    "lora-dropout": ("lora", "model.lora_dropout=0.1", "save_adapter_weights_only=True"),
    "qlora": ("lora", "model.quantize_base=True", *WIDE, "save_adapter_weights_only=True"),
}


@pytest.mark.parametrize("case", few(CASES, "full", "lora-dropout"))
def test_the_probe_leaves_no_trace(
    case: str, tune_run: TuneRun, baseline: TuneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that is bound to the configured size changes no bit of the run that follows."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    stock = baseline(*CASES[case], stock=True)
    ours = tune_run(*CASES[case], *PROBE, "adaptive_batching.max_batch_size=4", name="ours")
    [probe] = events(ours, "probe")
    assert probe["batch_size"] == 4
    assert any(m["batch_size"] == 4 and m["fits"] for m in probe["measurements"])
    if "search" not in str(CASES[case]):
        assert probe["search"] == "predict", "the step could be traced"
    assert all(step["batch_size"] == 4 for step in ours.metrics)
    assert without_sizes(ours.metrics) == stock.metrics
    assert_same_weights(ours.weights(epoch=1), stock.weights(epoch=1))


@pytest.mark.wide
@pytest.mark.serial
def test_a_probe_that_went_over_its_limit_leaves_no_trace(tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMeter, "fails_safely", True)  # as on a GPU
    few = ["dataset.split=train[:160]", "tokenizer.max_seq_len=256", "epochs=1"]
    run = partial(tune_run, "full", *few, replaced={"lr_scheduler": None})
    # What a process loads and keeps in its first run is no memory of the second.
    run("batch_size=1", "max_steps_per_epoch=1", name="first", stock=True)
    meter = CpuMeter()
    meter.release()
    limit = f"adaptive_batching.memory_limit={meter.used_bytes() + 230 * 2**20}"
    searched = ["use_maximum_batch_size=True", "adaptive_batching.search=binary_search", limit]
    ours = run("batch_size=1", *searched, name="ours")
    [probe] = events(ours, "probe")
    assert any(not m["fits"] for m in probe["measurements"])
    assert 10 < probe["batch_size"] < 150
    stock = run(f"batch_size={probe['batch_size']}", name="stock", stock=True)
    assert without_sizes(ours.metrics) == stock.metrics
    assert_same_weights(ours.weights(epoch=0), stock.weights(epoch=0))


def test_the_maximum_is_trained_at_from_the_first_epoch(tune_run: TuneRun, caplog: pytest.LogCaptureFixture) -> None:
    warning = f"32 samples instead of 4, at the configured learning rate; to keep 4, set {what_keeps_global_batch(1)}"
    run = tune_run("full", *PROBE, name="ours")
    assert warning in caplog.text
    caplog.clear()
    [probe] = events(run, "probe")
    assert (probe["batch_size"], probe["sequence_length"]) == (32, 64)  # of 50 samples, down to a power of two
    assert [(e["batch_size"], e["steps"], e["dropped_samples"]) for e in events(run, "epoch")] == [(32, 1, 18)] * 2
    assert [step["global_batch_size"] for step in run.metrics] == [32, 32]
    as_it_fits = ["adaptive_batching.round_to_power_of_two=False", "adaptive_batching.lr_scaling=sqrt"]
    exact = tune_run("full", *PROBE, *as_it_fits, name="exact")
    assert "each optimizer step sees" not in caplog.text, "its rate follows"
    assert events(exact, "probe")[0]["batch_size"] == 50
    assert events(exact, "probe")[0]["reason"] == "50 samples of data"
    stock = tune_run("full", "batch_size=50", "lr_scheduler.num_warmup_steps=0", name="stock", stock=True)
    assert stock.metrics[0]["loss"] == exact.metrics[0]["loss"], "the same fifty samples in the first step"


def test_the_step_of_any_configured_batch_is_probed(tune_run: TuneRun) -> None:
    """Stock makes a tensor for the configured batch, and a larger one between the two sizes that are traced."""
    [probe] = events(tune_run("full", *PROBE, "batch_size=2", "epochs=1", name="two"), "probe")
    assert (probe["search"], probe["batch_size"]) == ("predict", 32) and len(probe["measurements"]) <= 3
    accumulates = ["gradient_accumulation_steps=3", "adaptive_batching.round_to_power_of_two=False"]
    run = tune_run("lora", *PROBE, *accumulates, name="accumulates")
    [probe] = events(run, "probe")
    assert (probe["search"], probe["batch_size"]) == ("predict", 16)
    assert [(e["steps"], e["samples"]) for e in events(run, "epoch")] == [(1, 48)] * 2, "data for one step each"


def test_sequence_length_is_what_is_probed_at(tune_run: TuneRun) -> None:
    def peak(*overrides: str) -> tuple[int, int]:
        run = tune_run("full", *PROBE, "epochs=1", *overrides, name="".join(filter(str.isalnum, str(overrides))))
        [probe] = events(run, "probe")
        return probe["sequence_length"], max(m["peak_bytes"] for m in probe["measurements"])

    from_tokenizer, explicit = peak(), peak("adaptive_batching.sequence_length=200")
    few_long = ["dataset.split=train[:60]", "batch_size=8", "model.max_seq_len=1024", "max_steps_per_epoch=1"]
    few_long.append("adaptive_batching.max_batch_size=8")
    assert peak("tokenizer.max_seq_len=null", *few_long)[0] > 100, "from the data"
    assert peak("dataset.packed=True", "tokenizer.max_seq_len=96", "batch_size=2")[0] == 96
    assert (from_tokenizer[0], explicit[0]) == (64, 200)
    assert explicit[1] > from_tokenizer[1] + 32 * 100 * 700 * 4, "at least the logits of the longer samples"


def test_a_stored_result_is_used_again_until_what_it_depends_on_changes(
    tune_run: TuneRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adaptive_batching")

    def messages(*overrides: str) -> str:
        caplog.clear()
        tune_run("full", *PROBE, "epochs=1", *overrides)
        return caplog.text

    first = messages()
    assert "trial 1" in first
    same = messages("optimizer.lr=5e-4")
    assert "trial 1" not in same
    assert "maximum batch size 32, from the stored probe" in same
    lower = messages("adaptive_batching.max_batch_size=16")
    assert (
        "found 32, and now only 16 are of use" in lower and "maximum batch size 16, bound by max_batch_size=16" in lower
    )
    assert "looked no further than 16, and now up to 50 are of use" in messages()
    longer = messages("tokenizer.max_seq_len=80", "enable_activation_checkpointing=True")
    assert "run.enable_activation_checkpointing: False -> True, run.sequence_length: 64 -> 80" in longer
    assert "trial 1" in longer
    other = messages("optimizer._component_=torch.optim.SGD")
    assert "run.optimizer._component_: 'torch.optim.AdamW' -> 'torch.optim.SGD'" in other and "trial 1" in other


@pytest.mark.parametrize("probes", [True, False])
def test_a_limit_below_what_is_in_use_is_refused_as_such(probes: bool, tune_run: TuneRun) -> None:
    growth = [] if probes else ["batch_increase_function._component_=null", "adaptive_batching.recover_from_oom=True"]
    with pytest.raises(SystemExit) as end:
        tune_run("full", f"use_maximum_batch_size={probes}", *growth, "adaptive_batching.memory_limit=20MiB")
    message = str(end.value)
    assert re.search(r"adaptive_batching\.memory_limit=20MiB is used up before the first step", message), message
    assert re.search(r": [\d.]+ [MG]iB are in use already; write how much training may use in total, out", message)
    with pytest.raises(ConfigError, match=r"batching\.headroom=1000GiB is [\d.]+ GiB, but only [\d.]+ GiB are free"):
        require_room(AdaptiveBatchingConfig.from_mapping({"headroom": "1000GiB"}), CpuMeter())


@pytest.mark.serial
def test_a_batch_of_one_that_does_not_fit_ends_with_what_would_help(tune_run: TuneRun) -> None:
    tune_run("full", *WIDE, "epochs=1", "max_steps_per_epoch=1", name="before")  # what a process takes once is there
    meter = CpuMeter()
    meter.release()
    limit = meter.used_bytes() + 24 * 2**20
    with pytest.raises(SystemExit) as end:
        tune_run("full", *WIDE, "use_maximum_batch_size=True", f"adaptive_batching.memory_limit={limit}")
    message = str(end.value)
    size = r"[\d.]+ [MG]iB"  # of a process that has a CUDA build of torch it is more than a GiB
    assert re.search(
        rf"one sample does not fit in {size}: it (took {size}, [\d.]+ MiB too much|ran out of memory)", message
    ), message
    for remedy in ("set enable_activation_checkpointing=True; 'adaptive-batching plan'", "memory_limit"):
        assert remedy in message, message


def test_a_batch_that_is_only_cut_is_probed_no_further_than_larger_forwards_are_of_use(
    tune_run: TuneRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The speed of the machine tells how large that is; a time for it makes the test the same everywhere."""
    monkeypatch.setattr("tests.conftest.probes_by_speed", True)
    seconds = {1: 0.03, 2: 0.05}
    note = ForwardTimes.note
    monkeypatch.setattr(ForwardTimes, "note", lambda self, samples, _: note(self, samples, seconds.get(samples, 1.0)))
    caplog.set_level(logging.INFO)
    sgd = ["optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1", "epochs=1", "batch_size=48"]
    common = [*sgd, "adaptive_batching.memory_limit=16GiB"]
    padded = ["micro_batch_size=auto", "adaptive_batching.padding=True"]
    split = tune_run("full", *common, *padded, name="split")
    [probe] = events(split, "probe")
    assert [step["batch_size"] for step in probe["measurements"]] == [1, 2]
    assert [step["steps"] for step in probe["measurements"]] == [1, 1], "of which each has two forwards"
    assert probe["enough"] == 36, "33, or the next size of four binary digits"
    assert "not measured at full size" in caplog.text
    assert_close(split, tune_run("full", *common, name="whole"), epoch=0)
    again = tune_run("full", *common, *padded, name="split")
    assert events(again, "probe")[0]["enough"] == 36 and "from the stored probe" in caplog.text
    # Rows learn their size while they train: the longest sample shows that as many as a step has fit by far.
    [probe] = events(tune_run("full", *common, "micro_batch_size=auto", name="rows"), "probe")
    assert [step["batch_size"] for step in probe["measurements"]] == [1] and probe["enough"] == 48
    # With the maximum asked for, it is run.
    whole = tune_run("full", *common, "micro_batch_size=auto", "use_maximum_batch_size=True", name="maximum")
    assert events(whole, "probe")[0]["enough"] is None and events(whole, "probe")[0]["batch_size"] >= 48
