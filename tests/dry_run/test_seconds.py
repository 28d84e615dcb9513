"""Seconds of a step, from what it asks of a card: against what is known of such cards, and by properties of clocks."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptive_batching._dry_run import compared
from adaptive_batching._dry_run.calibration import as_option, check_card, read_correction, seconds_of_record
from adaptive_batching._dry_run.cards import GPUS, Gpu, find_gpus, read_card
from adaptive_batching._dry_run.time.forecast import Forecast, RunLength, cheapest_and_fastest, kind_of, uncounted_in
from adaptive_batching._dry_run.time.seconds import (
    CONSTANTS,
    Correction,
    correction_for,
    seconds_of_step,
    sustained,
    useful_share,
)
from adaptive_batching._dry_run.time.step_work import Operation, StepWork
from adaptive_batching._dry_run.times import time_in_words
from adaptive_batching._values import ConfigError

A100, H100, H200, RTX_4090 = (find_gpus(name)[0] for name in ("a100 80gb", "h100", "h200", "4090"))
PRODUCT = Operation("product", "mm", 3 * 2 * 8192**2, 2 * 8192**3, "bfloat16", (8192, 8192, 8192), where="model.py:3")
KERNEL = Operation("kernel", "gelu", 2**30, dtype="bfloat16", where="model.py:4")
TINY = Operation("kernel", "add", 4096, dtype="float32", where="model.py:5")
GATHER = Operation("collective", "_allgather_base_", 2**31, ranks=8)
ARRIVAL, WAIT = Operation("arrival", "", ranks=0), Operation("wait", "item")


def work(*operations: Operation) -> StepWork:
    numbers = {one: number for number, one in enumerate(dict.fromkeys(operations))}
    return StepWork([*numbers], [numbers[one] for one in operations])


def seconds(*operations: Operation, card: Gpu = A100) -> float:
    return seconds_of_step(work(*operations), card).seconds


def test_a_large_product_takes_what_the_card_sustains() -> None:
    least = PRODUCT.flops / (268e12 * CONSTANTS.product)  # 268: measured at best on an A100 of 400 watts
    assert least == pytest.approx(seconds(PRODUCT), rel=0.1)


def test_a_kernel_takes_as_long_as_its_bytes_and_what_fits_the_cache_less() -> None:
    assert seconds(KERNEL) - CONSTANTS.kernel == pytest.approx(2**30 / (A100.bandwidth * 1e9 * CONSTANTS.bandwidth))
    cache = int(RTX_4090.cache_mib * 2**20)
    rates = []
    for size in (cache // 2, cache, 2 * cache, 4 * cache):
        took = seconds(*[replace(KERNEL, bytes=size)] * 64, card=RTX_4090) / 64 - CONSTANTS.kernel
        rates.append(size / took / (RTX_4090.bandwidth * 1e9 * CONSTANTS.bandwidth))
    beyond = CONSTANTS.cached - 1
    assert rates == pytest.approx([1 + 0.75 * beyond, 1 + 0.5 * beyond, 1, 1], rel=0.02)


def test_small_kernels_take_as_long_as_the_host_takes_to_launch_them() -> None:
    step = seconds_of_step(work(*[TINY] * 1000), A100)
    assert step.seconds == pytest.approx(1000 * CONSTANTS.launch, rel=0.01) and step.limit == "host"
    assert seconds(*[TINY] * 1000, card=H100) == pytest.approx(step.seconds, rel=0.01)  # no card helps


def test_what_limits_a_step_adds_up_to_its_seconds_and_is_told_by_line() -> None:
    gather = replace(GATHER, bytes=2**32)
    step = seconds_of_step(work(PRODUCT, KERNEL, *[TINY] * 300, gather, ARRIVAL, KERNEL, WAIT), A100)
    assert sum(step.limits.values()) == pytest.approx(step.seconds)
    assert set(step.limits) == {"products", "memory", "host", "communication"}
    assert step.lines["products"] == {"model.py:3": pytest.approx(step.limits["products"])}
    assert set(step.lines["memory"]) == {"model.py:4", "model.py:5"}


def test_the_host_goes_on_only_after_the_device_where_it_waits() -> None:
    many = [TINY] * 100
    assert seconds(KERNEL, *many, WAIT) >= seconds(KERNEL, *many)
    assert seconds(WAIT, KERNEL, WAIT, *many) > seconds(KERNEL, *many)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_collectives_are_hidden_where_the_card_is_busy_and_waited_for_where_it_needs_them(ranks: int) -> None:
    gather = replace(GATHER, ranks=ranks)
    alone, busy = seconds(gather), [KERNEL] * 400
    assert seconds(gather, *busy) < alone + seconds(*busy)
    assert seconds(gather, *busy) == pytest.approx(max(seconds(*busy), alone), rel=0.05)
    waited = seconds(gather, ARRIVAL, *busy)
    assert waited == pytest.approx(alone + seconds(*busy), rel=0.05)
    assert seconds(replace(gather, name="allreduce_")) > 1.5 * alone  # it is handed out again
    assert seconds(replace(gather, ranks=1)) < alone


def test_a_reduction_begins_when_what_it_sums_is_there() -> None:
    assert seconds(KERNEL, KERNEL, replace(GATHER, name="_reduce_scatter_base_")) > seconds(KERNEL, KERNEL, GATHER)


@pytest.mark.parametrize(
    ("shape", "least", "most"),
    [
        ((128 * 108, 256, 4096), 0.99, 1.0),  # one tile for each processor
        ((128 * 109, 256, 4096), 0.5, 0.99),  # and one too many
        ((16, 4096, 4096), 0.05, 0.3),  # rows that fill an eighth of a tile
        ((4, 4096, 4096), 1.0, 1.0),  # it is the matrix that takes the time to read
        ((32, 128, 128, 64), 0.2, 1.0),
    ],
)
def test_tiles_and_waves_tell_what_of_a_product_is_of_use(shape: tuple[int, ...], least: float, most: float) -> None:
    assert least <= useful_share(shape, A100.processors) <= most


def test_more_of_anything_never_takes_less() -> None:
    step = [PRODUCT, KERNEL, TINY, TINY]
    for more in (PRODUCT, KERNEL, TINY):
        assert seconds(*step, more) >= seconds(*step)
    for better in (replace(A100, bandwidth=4000), replace(A100, peak_tflops=400, watts=600)):
        assert seconds(*step, card=better) <= seconds(*step)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_card_sustains_less_than_its_peak_and_more_in_half_precision(gpu: Gpu) -> None:
    half, tf32, single, bfloat16 = (sustained(gpu, dtype) for dtype in ("float16", "tf32", "float32", "bfloat16"))
    assert bfloat16 == (half if gpu.capability >= (8, 0) else single), "tensor cores take it since Ampere"
    assert 0.4 * gpu.peak_tflops < half <= gpu.peak_tflops
    assert half >= tf32 >= 0.9 * single > 0
    assert 100 <= gpu.bandwidth <= 8000 and 2 <= gpu.cache_mib <= 128 and 60 <= gpu.watts <= 1000
    assert gpu.link is None or gpu.link > gpu.bus
    assert gpu.peak_tflops >= 1.9 * gpu.single_tflops


@pytest.mark.parametrize("measured", [0.5, 1.0, 1.3, 3.0])
@pytest.mark.parametrize("many", [[PRODUCT] * 20, [TINY] * 500], ids=["card", "host"])
def test_a_correction_makes_a_step_take_what_it_was_measured_to_take(measured: float, many: list[Operation]) -> None:
    step = work(*many)
    wanted = measured * seconds_of_step(step, A100).seconds
    correction = correction_for(wanted, step, A100)
    assert seconds_of_step(step, A100, correction).seconds == pytest.approx(wanted, rel=0.02)
    assert read_correction(as_option(correction)).card == pytest.approx(correction.card, rel=0.01)
    assert (correction.card == 1) == (many[0] is TINY)


def test_a_host_is_more_likely_to_be_slow_than_a_card() -> None:
    """As on an H200, where a small step took 2.3 times as long as its forecast, which did not count on that host."""
    for size, slow in ((40, Correction(host=3.3)), (160, Correction(card=1.3))):
        step = work(*[replace(KERNEL, bytes=size * 2**20)] * 200)
        assert seconds_of_step(step, H200).limit == "memory"
        found = correction_for(seconds_of_step(step, H200, slow).seconds, step, H200)
        assert (found.card, found.host) == pytest.approx((slow.card, slow.host), rel=0.02)


def test_a_processor_keeps_up_only_so_many_bytes_and_unaligned_products() -> None:
    large = replace(KERNEL, bytes=2**33)
    assert 2**33 / seconds(large, card=H200) == pytest.approx(3e12, rel=0.01), "an H200 is not as fast as its memory"
    assert 2**33 / seconds(large, card=A100) == pytest.approx(0.85 * 2039e9, rel=0.01), "an A100 is"
    odd = replace(PRODUCT, is_aligned=False)
    assert 5 < seconds(odd, card=H200) / seconds(PRODUCT, card=H200) < 7
    assert 2 < seconds(odd) / seconds(PRODUCT) < 3


@pytest.mark.parametrize("text", ["1.07", "card", "card=", "card=-1", "memory=1.1", "card=a"])
def test_a_mistaken_correction_is_an_error_that_says_how(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--correction .* such as card=1\.07"):
        read_correction(text)


def write_record(folder: Path, steps: list[dict[str, Any]], **of_run: Any) -> Path:
    path = folder / "report.jsonl"
    begun = {"event": "run", "version": 1, "ranks": 2, **of_run}
    events = [begun, *({"event": "step", "epoch": 0, **step} for step in steps)]
    path.write_text("\n".join(map(json.dumps, events)))
    return path


def test_a_record_tells_the_seconds_of_a_step_by_its_tokens_without_the_first_steps(tmp_path: Path) -> None:
    first = [dict(step=n, seconds=60.0, padded_tokens=1000) for n in (1, 2, 3)]
    later = [dict(step=n, seconds=0.001 * n, padded_tokens=n) for n in range(4, 9)]  # a millisecond for a token
    path = write_record(tmp_path, [*first, *later])
    assert seconds_of_record(path, tokens=4000) == pytest.approx(2.0)  # 2,000 on each of two devices
    assert seconds_of_record(path, tokens=0) == pytest.approx(0.006)
    with pytest.raises(ConfigError, match="3 timed steps; give the record of a run of 6 or more"):
        seconds_of_record(write_record(tmp_path, first), 4000)


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("NVIDIA A100-SXM4-80GB", None),
        ("NVIDIA X9000", None),  # not in the list: --card may describe it
        ("NVIDIA H200", "is of a run on NVIDIA H200, and not on A100-80GB; put --gpu 'H200' first"),
        ("cpu", "is of a run on the CPU; give the record of a run on a GPU"),
    ],
)
def test_a_record_corrects_the_card_that_it_is_of(device: str, says: str | None, tmp_path: Path) -> None:
    record = write_record(tmp_path, [], device=device)
    with pytest.raises(ConfigError, match=re.escape(says)) if says else contextlib.nullcontext():
        check_card(record, A100)


def test_hours_and_cost_follow_from_epochs_steps_or_tokens() -> None:
    step = seconds_of_step(work(PRODUCT, KERNEL), A100)
    forecast = Forecast(step, "A100-80GB", "one device", 4, samples=8, tokens=8192, steps_in_epoch=500)
    hours = 1000 * step.seconds / 3600
    for length in (RunLength(epochs=2), RunLength(steps=1000), RunLength(tokens=8_192_000)):
        assert forecast.hours(length) == pytest.approx(hours)
        assert forecast.cost(length) is None
        assert forecast.cost(replace(length, price=2.0)) == pytest.approx(hours * 4 * 2)
    assert forecast.hours(RunLength()) is None
    assert replace(forecast, steps_in_epoch=None).hours(RunLength(epochs=2)) is None


def test_the_words_say_what_limits_a_step_how_well_that_is_known_and_what_it_adds_up_to() -> None:
    step = seconds_of_step(work(PRODUCT, KERNEL), A100)
    forecast = Forecast(step, "L40S", "one device", 1, samples=8, tokens=8192, uncounted={"linalg_qr": 2})
    said = dict(reversed(time_in_words(forecast, RunLength(steps=1000, price=2.0))))
    assert "a step, " in said["time"] and "tokens/s: matrix products " in said["time"]
    assert said["within"].endswith("where 90 % of published runs lie (one device)")
    elsewhere = replace(forecast, card="RTX 5090")
    assert dict(time_in_words(elsewhere, RunLength()))["within"].endswith("(one device; none was on RTX 5090)")
    assert forecast.between and elsewhere.between
    measured = replace(forecast, card="H200")
    assert measured.between and dict(time_in_words(measured, RunLength()))["within"].endswith("(one device)")
    lows, highs = zip(*(each.between or () for each in (forecast, measured, elsewhere)), strict=True)
    assert [*lows] == sorted(lows, reverse=True) and [*highs] == sorted(highs)
    slow = dict(time_in_words(replace(forecast, on_slow_host=2 * step.seconds), RunLength()))
    assert slow["slow host"].endswith("if the CPU takes 33 us to launch an operation, as on some hosts, instead of 10")
    assert "slow host" not in dict(time_in_words(replace(forecast, on_slow_host=1.05 * step.seconds), RunLength()))
    assert "linalg_qr (2)" in said["longer"] and " hours for " in said["in all"]
    for length in (RunLength(epochs=1), RunLength(tokens=10)):
        said = dict(time_in_words(replace(forecast, tokens=0), length))
        assert said["in all"].startswith("not known") and "--steps-in-all" in said["in all"]


def test_the_cheapest_and_the_fastest_that_fit_are_found() -> None:
    fast, slow = (
        Forecast(seconds_of_step(work(*[PRODUCT] * 9), gpu), gpu.name, "one device", 1, 8, 8192)
        for gpu in (H100, RTX_4090)
    )
    prices = [RunLength(steps=10, price=price) for price in (9.0, 3.0, 0.4)]
    assert cheapest_and_fastest([None, fast, slow], prices) == (2, 1)
    assert cheapest_and_fastest([None, fast, slow], [RunLength()] * 3) == (None, 1)
    assert cheapest_and_fastest([None], [RunLength()]) == (None, None)


@pytest.mark.parametrize("unit", ["tokens", "samples"])
def test_cards_are_compared_by_what_they_train_and_not_by_steps_of_unlike_sizes(unit: str) -> None:
    small, large = (
        Forecast(
            seconds_of_step(work(*[PRODUCT] * times), A100), "A100-80GB", "one device", 1, samples=amount,
            tokens=amount if unit == "tokens" else 0,
        )
        for times, amount in ((2, 1000), (3, 4000))
    )  # fmt: skip
    for length in (RunLength(price=1.0), RunLength(steps=10, price=1.0)):
        assert cheapest_and_fastest([small, large], [length] * 2) == (1, 1), "three times the work for four as many"
    epochs = RunLength(epochs=1, price=1.0)  # of unlike lengths, padding included: hours count
    padded = replace(large, steps_in_epoch=100)
    assert cheapest_and_fastest([replace(small, steps_in_epoch=100), padded], [epochs] * 2) == (0, 0)


@pytest.mark.parametrize(
    ("pcie", "other"), [("H100 PCIe", "H100"), ("A100 80GB PCIe", "A100 80GB SXM"), ("H100 HBM2e", "H100")]
)
def test_a_card_of_less_power_or_slower_memory_takes_longer_than_the_one_of_its_name(pcie: str, other: str) -> None:
    slower, faster = (find_gpus(name)[0] for name in (pcie, other))
    for one in (PRODUCT, KERNEL):
        assert seconds(one, card=slower) > 1.04 * seconds(one, card=faster)


def test_the_kind_of_a_run_is_told_by_what_it_asks() -> None:
    convolution = Operation("convolution", "convolution", 2**20, 10**12, "float16")
    dequantize = Operation("kernel", "dequantize_4bit", 2**20)
    for one, ranks, kind in (
        ([PRODUCT], 1, "one device"), ([PRODUCT], 8, "several devices"), ([convolution, TINY], 1, "convolutions"),
        ([PRODUCT, dequantize], 1, "4-bit weights"), ([TINY] * 50, 1, "limited by the host"),
    ):  # fmt: skip
        assert kind_of(work(*one), seconds_of_step(work(*one), A100), ranks) == kind


def test_what_takes_longer_than_is_counted_is_named() -> None:
    names = ["linalg_qr", "linalg_qr", "_fft_c2c", "linalg_vector_norm", "mul"]
    assert uncounted_in(work(*[replace(TINY, name=name) for name in names])) == {"linalg_qr": 2, "_fft_c2c": 1}


def test_a_card_of_one_s_own_is_read_and_a_mistake_in_it_named(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    given = {"name": "mine", "memory_gib": 23.5, "peak_tflops": 100, "bandwidth": 900, "capability": [8, 9]}
    path.write_text(json.dumps(given))
    assert read_card(path) == Gpu("mine", 23.5, 100, (8, 9), bandwidth=900)
    for wrong, said in (
        ({**given, "bandwith": 1}, "there is no 'bandwith'"), ({"name": "mine"}, "lacks 'memory_gib'"),
        ([], "not an object"),
        ({**given, "watts": "400"}, "watts is '400' and must be a number"), ({**given, "capability": 8}, r"\[9, 0\]"),
    ):  # fmt: skip
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=said):
            read_card(path)
    with pytest.raises(ConfigError, match="name another file"):
        read_card(tmp_path / "no.json")


def test_work_is_written_and_read_as_it_was() -> None:
    step = work(PRODUCT, KERNEL, TINY, PRODUCT)
    assert StepWork.from_object(json.loads(json.dumps(step.as_object()))) == step


def test_a_table_of_cards_names_those_that_no_published_run_was_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared, "as_object", lambda run, length: {})
    step = seconds_of_step(work(PRODUCT), H100)
    for cards, said in (["L40S", "H100"], None), (["L40S", "L4", "RTX 3090"], "with: L4, RTX 3090"):
        columns = [compared.Column(card, None, RunLength(), None) for card in cards]
        forecasts = [Forecast(step, card, "one device", 1, 8, 8192) for card in cards]
        runs = [SimpleNamespace(forecast=forecast, worst=None, answer="fits") for forecast in forecasts]
        _, lines = compared.compare(columns, runs)  # type: ignore[arg-type]
        assert len(lines) == len(cards) + 1 if said is None else lines[-1].endswith(said)
