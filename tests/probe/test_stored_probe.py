"""What a probe has found is taken again exactly while all that it depends on holds."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adaptive_batching._probe.sizes import Measurement, ProbeResult, candidate_sizes
from adaptive_batching._probe.stored_probe import (
    Conditions,
    StoredProbe,
    described,
    plain,
    read_stored,
    store_probe,
    taken_again,
)
from tests.support.examples import RESULT

CONDITIONS = Conditions(
    settings={"round_to_power_of_two": True, "memory_limit": None}, run={"optimizer": {"fused": True}, "dtype": "fp32"},
    model={"0": {"class": "Decoder", "parameters": 12}}, versions={"torch": "2.13.0"},
    devices={"name": "A", "ranks": 1},
)  # fmt: skip
FOUND = StoredProbe(RESULT, CONDITIONS, upper=64, tokens=128)
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"settings": {"round_to_power_of_two": False, "memory_limit": None}}, "settings.round_to_power_of_two: True -> F"),
    ({"run": {"optimizer": {"fused": False}, "dtype": "fp32"}}, "run.optimizer.fused: True -> False"),
    ({"run": {"dtype": "fp32"}}, "run.optimizer.fused: True -> None"),
    ({"model": {"0": {"class": "Decoder", "parameters": 13}}}, "model.0.parameters: 12 -> 13"),
    ({"versions": {"torch": "2.14.0"}}, "versions.torch: '2.13.0' -> '2.14.0'"),
    ({"devices": {"name": "B", "ranks": 2}}, "devices.name: 'A' -> 'B', devices.ranks: 1 -> 2"),
]


def again(found: StoredProbe, *, stays: bool = False, **given: Any) -> StoredProbe | None:
    arguments: dict[str, Any] = {"now": CONDITIONS, "upper": 64, "available": 1000, **given}
    return taken_again(found, **arguments, stays=stays, source="it")


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize(("changed", "said"), CHANGES, ids=[said for _, said in CHANGES])
def test_a_condition_that_has_changed_is_told_in_one_line_and_calls_for_another_probe(
    changed: dict[str, Any], said: str, stays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert again(FOUND) == FOUND and not caplog.messages
    assert again(FOUND, now=dataclasses.replace(CONDITIONS, **changed), stays=stays) is None
    [line] = caplog.messages
    assert line.startswith(f"probing again: it does not hold, because these changed: {said}") and "\n" not in line


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"upper": 7}, "it found 8, and now only 7 are of use"),
        ({"available": 890}, "what it found takes 0.0 MiB, but only 0.0 MiB are left"),
        ({"available": 2**22}, "it had 0.0 MiB, and now there are 4.0 MiB"),
        ({"found": dataclasses.replace(FOUND, upper=8, result=dataclasses.replace(RESULT, reason="8 samples"))},
         "it looked no further than 8, and now up to 64 are of use"),
    ],
    ids=["lower bound", "less memory", "more memory", "higher bound"],
)  # fmt: skip
def test_other_bounds_are_told_in_one_line(given: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert again(**{"found": FOUND, **given}) is None
    assert caplog.messages == [f"probing again: {said}"]


def test_a_run_that_goes_on_keeps_what_fits_and_says_that_more_would(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert again(FOUND, stays=True, available=2**22) == FOUND
    [line] = caplog.messages
    assert "about 16 would fit instead of 8; a run that goes on keeps its sizes" in line
    assert again(FOUND, stays=True, available=890) is None and "only 0.0 MiB are left" in caplog.text


def probed(peak: Any, upper: int, budget: int, *, rounds: bool, predicts: bool) -> StoredProbe | None:
    """Return what a perfect probe finds: the largest candidate that fits."""
    candidates = candidate_sizes(upper, powers_of_two=rounds)
    fitting = [size for size in candidates if peak(size) <= budget]
    if not fitting:
        return None
    size = fitting[-1]
    reason = "memory" if size != candidates[-1] else "the data"
    predicted = [(each, peak(each)) for each in range(1, 2 * size + 3)] if predicts else []
    measured = [Measurement(1, True, peak(1)), Measurement(size, True, peak(size))]
    result = ProbeResult(size, reason, budget, 10**6, "predict", 1.0, measured, predicted)
    return StoredProbe(result, dataclasses.replace(CONDITIONS, settings={"round_to_power_of_two": rounds}), upper)


def test_what_is_taken_again_is_what_a_probe_would_find() -> None:
    """A thousand curves of memory, each probed in some bounds and met in others."""
    chance = random.Random(0)
    kept = probed_again = 0
    for _ in range(1000):
        start, rise, square = chance.randrange(1, 5000), chance.randrange(1, 300), chance.choice([0, 1])
        peak = lambda size, a=start, b=rise, c=square: a + b * size + c * size * size  # noqa: E731
        rounds, predicts = chance.choice([True, False]), chance.choice([True, False])
        before = probed(peak, chance.randrange(1, 60), chance.randrange(1, 20000), rounds=rounds, predicts=predicts)
        if before is None:
            continue
        upper = chance.choice([before.upper, chance.randrange(1, 60)])
        available = int(before.result.budget_bytes * chance.choice([0.5, 0.9, 1.0, 1.01, 1.3, 3]))
        now = probed(peak, upper, available, rounds=rounds, predicts=predicts)
        held = again(before, now=before.conditions, upper=upper, available=available)
        stays = again(before, now=before.conditions, upper=upper, available=available, stays=True)
        if held is not None:
            kept += 1
            assert held == stays and now is not None
            assert held.result.batch_size <= now.result.batch_size
            # A perfect probe goes for a single sample more, and for a byte; this is for what is worth its time.
            if now.result.batch_size > held.result.batch_size:
                by_noise = available <= 1.02 * before.result.budget_bytes
                by_eighth = not rounds and now.result.batch_size < 1.125 * held.result.batch_size + 1
                assert by_noise or by_eighth or not predicts
        else:
            probed_again += 1
            if stays is None:
                assert peak(before.result.batch_size) > available or upper != before.upper
    assert min(kept, probed_again) > 200


def test_what_is_enough_is_bounded_without_a_probe() -> None:
    result = dataclasses.replace(RESULT, enough=36, predicted=[(36, 990)], batch_size=2)
    found = dataclasses.replace(FOUND, result=result)
    lower = again(found, upper=20)
    assert lower is not None and (lower.samples, lower.result.batch_size) == (20, 2)
    assert again(found, available=2**40) == found, "larger ones are of no use"
    assert again(found, upper=1) is None
    assert again(dataclasses.replace(found, upper=36)) is None, "more may be of use, and is now"


def test_it_is_stored_and_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "new" / "probe.json"
    store_probe(path, FOUND)
    assert read_stored(lambda: StoredProbe.from_dict(json.loads(path.read_text())), "it") == FOUND
    assert list(path.parent.iterdir()) == [path]


WITHOUT_PEAK = {**FOUND.to_dict(), "result": {**RESULT.to_dict(), "batch_size": 16}}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "null", '"result"', '{"result": {}}', '{"result": {"measurements": 3}}', "\x00\xff",
     json.dumps({**FOUND.to_dict(), "of_another_version": 1}), json.dumps({**FOUND.to_dict(), "upper": "many"}),
     json.dumps({**FOUND.to_dict(), "conditions": {}}), json.dumps(WITHOUT_PEAK)],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_told_in_one_line(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "probe.json"
    path.write_bytes(text.encode("latin-1"))
    assert read_stored(lambda: StoredProbe.from_dict(json.loads(path.read_text())), "it") is None
    [line] = caplog.messages
    assert line.startswith("probing again: it cannot be read (") and "\n" not in line
    assert read_stored((tmp_path / "missing.json").read_text, "it") is None and len(caplog.messages) == 1


def test_models_differ_by_class_shapes_dtypes_training_and_attention() -> None:
    def make(
        width: int = 4, dtype: torch.dtype = torch.float32, *, trains: bool = True, attention: str = "sdpa"
    ) -> Any:
        model = nn.Sequential(nn.Linear(2, width, dtype=dtype))
        model.config = type("Config", (), {"_attn_implementation": attention})()  # type: ignore[assignment]
        return model.requires_grad_(trains)

    class Other(nn.Sequential):
        pass

    torch.manual_seed(1)  # weights differ
    assert described(make()) == described(make())
    others = [make(8), make(dtype=torch.bfloat16), make(trains=False), make(attention="eager"), Other(*make())]
    found = [json.dumps(described(each)) for each in (make(), *others)]
    assert len({*found}) == len(found)


def test_conditions_are_as_json_gives_them_back() -> None:
    values = {"sizes": (1, 2), "dtype": torch.float32, "made": probed, 3: None}
    assert plain(values) == {"sizes": [1, 2], "dtype": "torch.float32", "made": "<function probed>", "3": None}
