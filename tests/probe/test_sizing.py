"""What every combination of settings asks of a probe, and makes of its answer.

``sizing.txt`` holds a line for each; ``python -m tests.probe.test_sizing`` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from adaptive_batching._config import AdaptiveBatchingConfig
from adaptive_batching._growth.controller import KeepGlobal
from adaptive_batching._probe.sizes import candidate_sizes
from adaptive_batching._probe.sizing import Sizes, Sizing, size_up
from adaptive_batching._torchtune.ppo.parts_of_batch import sizes_of_batch, sizing_of_part
from adaptive_batching._transformers.arguments import AdaptiveArguments
from adaptive_batching._values import ConfigError, Fixed

TABLE = Path(__file__).with_name("sizing.txt")
BATCH, SAMPLES = 4, 40
SETTINGS: dict[str, tuple[str, Any]] = {
    "maximum": ("use_maximum_batch_size", True), "grow": ("batch_increase_function", "a.b"),
    "2": ("micro_batch_size", 2), "auto": ("micro_batch_size", "auto"), "explore": ("micro_batch_size", "explore"),
    "global": ("keep_global_batch", True), "beyond": ("grow_beyond_memory", True), "most=12": ("max_batch_size", 12),
    "exact": ("round_to_power_of_two", False),
}  # fmt: skip
OF_SETTINGS = [("", "maximum"), ("", "2", "auto", "explore"), ("", "grow")]
OF_SECTION = [("", "global", "beyond"), ("", "most=12"), ("", "exact"), ("", "x3")]
OF_RUN = [("held", "few", "of=10"), ("", "x3")]
"""x3: batches of a step; held: gradients, by a forward; few: samples, 3; of=10: samples, after which the run ends."""


def combinations() -> Iterator[str]:
    yield from map(" ".join, product(["recipe", "trainer"], *OF_SETTINGS, *OF_SECTION))
    yield from map(" ".join, product(["recipe"], *OF_SETTINGS, *OF_RUN))
    yield from map(" ".join, product(["ppo"], *OF_SETTINGS, ["", "beyond"], ["", "most=12"], ["", "exact"]))
    yield from map(" ".join, product(["trainer"], *OF_SETTINGS, ["few"], ["", "x3"], ["", "global"]))


def sizing_of(words: str) -> Sizing | None:
    """Return the sizing of a run with the settings that these words stand for; None if they are refused or off."""
    host, *rest = words.split()
    values = dict(SETTINGS[word] for word in rest if word in SETTINGS)
    section = {key: values.pop(key) for _, (key, _) in SETTINGS.items() if key in values and key in SECTION}
    try:
        if host == "trainer":
            settings = AdaptiveArguments.of({**values, **section}).settings(BATCH)
        else:
            settings = AdaptiveBatchingConfig.from_mapping(section, batch_size=BATCH, **values)
    except ConfigError:
        return None
    if not settings.enabled:
        return None
    sizing = size_up(
        settings,
        batch_size=BATCH,
        accumulation=3 if "x3" in rest else 1,
        samples=3 if "few" in rest else SAMPLES,
        **dict.fromkeys(("keeps_rest", "plans_first", "keeps_batches"), host == "trainer"),
    )
    if host == "ppo" or {"held", "of=10"} & {*rest}:
        run_samples = 10 if "of=10" in rest else SAMPLES
        return sizing_of_part(sizing, parts_of(words), run_samples=run_samples, holds_gradients="held" in rest)
    return sizing


def parts_of(words: str) -> int:
    """Return the equal parts of a batch that each have a backward pass."""
    return 2 if words.startswith("ppo") else 1


SECTION = ("keep_global_batch", "grow_beyond_memory", "max_batch_size", "round_to_power_of_two")
KNOWN = {" ".join(words.split()): each for words in combinations() if (each := sizing_of(words)) is not None}


def answers(words: str, known: Sizing) -> dict[int | None, Sizes]:
    """Return what becomes of each size that the probe can find, by that size; None without a probe."""
    request, parts = known.request, parts_of(words)
    if not known.probes:
        return {None: sizes_of_batch(known.unprobed, parts)}
    sizes = candidate_sizes(max(request.upper, 1), powers_of_two=request.rounds, include=request.include)
    bounds = {size: request.upper_reason if size == sizes[-1] else "memory" for size in sizes}
    return {size: sizes_of_batch(known.sizes_from_probe(size, bound), parts) for size, bound in bounds.items()}


def asked_of(known: Sizing) -> Sizing:
    """Return ``known`` with what is asked of the probe in the end, where a host plans its batches before."""
    return known.of_forwards(known.accumulation.window(known.batch_size)) if known.keeps_batches else known


def line_of(words: str, known: Sizing) -> str:
    """Return what is decided for these settings in a line, as the table has it.

    settings | samples asked for + included, what bounds them, flags | answer: batch < its bound, what
    gives that, micro-batch x batches of a step, samples that fit in a forward
    """
    request = known.request if known.bounds_batch else asked_of(known).request
    flags = "".join(
        flag if holds else "-"
        for flag, holds in {
            "B": known.bounds_batch, "F": known.bounds_forwards, "S": known.splits, "r": request.rounds,
            "p": request.in_parts, "c": request.coarse, "e": request.may_stop_early,
        }.items()
    )  # fmt: skip
    include = "" if request.include is None else f"+{request.include}"
    found, told = answers(words, known), []
    for size in (None, 1, 6, max(known.request.upper, 1)):
        if size in found:
            sizes = found[size]
            batches = known.accumulation.batches_at(min(sizes.batch_size, known.accumulation.window(1)))
            fits = "" if sizes.fits is None else f" {sizes.fits} fit"
            parts = f"{sizes.batch_size}<{sizes.maximum} {short(sizes.reason)} {sizes.micro_batch_size}x{batches}{fits}"
            told.append(f"{size}: {parts}" if size else parts)
    asked = f"{request.upper}{include} {short(request.upper_reason)}" if known.probes else "-"
    return f"{words} | {asked} {flags} | {', '.join(told)}"


def in_forward(sizes: Sizes) -> int:
    """Return the samples of the longest length that a forward may have."""
    size = sizes.micro_batch_size
    return size.samples if isinstance(size, Fixed) else sizes.fits or sizes.maximum


def short(reason: str) -> str:
    return reason.split()[-1].strip("()")


def test_what_is_asked_and_what_is_made_of_the_answer_is_as_the_table_says() -> None:
    assert [line_of(*each) for each in KNOWN.items()] == TABLE.read_text().splitlines()


@pytest.mark.parametrize("host", ["recipe", "trainer", "ppo"])
def test_nothing_is_probed_that_is_of_no_use_and_no_answer_is_used_that_was_not_asked_for(host: str) -> None:
    for words, known in KNOWN.items():
        if not words.startswith(host) or known.request.upper < 2:
            continue
        matters = len({*answers(words, known).values()}) > 1
        assert matters == known.probes, words


def test_sizes_stay_within_their_bounds_come_out_even_and_grow_with_the_answer() -> None:
    for words, known in KNOWN.items():
        settings, before, parts = known.settings, None, parts_of(words)
        for found, sizes in answers(words, known).items():
            size = sizes.micro_batch_size
            if settings.grows or settings.use_maximum_batch_size:
                assert sizes.maximum <= max(known.request.upper * parts, 1), words
            assert sizes.fits in (None, found), words
            if found is not None and known.bounds_batch:
                assert sizes.maximum <= found * parts, words
            if found is not None and isinstance(size, Fixed):
                assert size.samples <= found, words
                even = sizes.maximum if not known.keeps_batches else known.accumulation.window(1)
                assert settings.grows or even % size.samples == 0, words
            if isinstance(known.accumulation, KeepGlobal) and settings.use_maximum_batch_size and not settings.grows:
                assert known.accumulation.samples % sizes.batch_size == 0, words
            assert sizes.maximum % parts == 0, words
            if before is not None:
                assert before.batch_size <= sizes.batch_size and before.maximum <= sizes.maximum, words
                assert in_forward(before) <= in_forward(sizes), words
            before = sizes


def test_the_bound_of_a_batch_is_named_in_words() -> None:
    reasons = {words: KNOWN[f"recipe {words}"].request.upper_reason for words in
               ("maximum", "maximum most=12", "maximum global x3", "maximum of=10", "auto")}  # fmt: skip
    assert [*reasons.values()] == [
        "40 samples of data", "max_batch_size=12", "the global batch, which is kept", "the 10 samples of the run",
        "the samples of an optimizer step",
    ]  # fmt: skip
    assert KNOWN["recipe maximum auto"].sizes_from_probe(6, "memory").reason == (
        "memory: about 6 fit, rounded down (round_to_power_of_two)"
    )


if __name__ == "__main__":
    TABLE.write_text("".join(f"{line_of(*each)}\n" for each in KNOWN.items()))
