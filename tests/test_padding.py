"""``adaptive-batching padding``: how much of a data set's batches is padding."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from adaptive_batching._padding import padding_of
from tests.support.command_line import in_this_process


def test_samples_of_one_length_have_no_padding_and_unlike_ones_as_much_as_drawn_pairs_have() -> None:
    assert padding_of([7] * 20, 4) == padding_of([7] * 20, 4, grouped=True) == 1
    lengths = [1, 3] * 500
    # A pair has 2, 4 or 6 tokens in (1 in 4, 1 in 2, 1 in 4) and is padded to 2, 6, 6.
    assert padding_of(lengths, 2) == pytest.approx(5 / 4, rel=0.02)
    assert padding_of(lengths, 2, grouped=True) == pytest.approx(1, abs=0.02)


def test_the_longer_the_tail_and_the_larger_the_batch_the_more_padding() -> None:
    draws = random.Random(1)
    lengths = [1 + int(draws.expovariate(1 / 50)) for _ in range(2000)]
    found = [padding_of(lengths, size) for size in (1, 2, 8, 32)]
    assert found == sorted(found) and found[0] == 1
    # Of b samples from an exponential distribution the longest is 1 + 1/2 + ... + 1/b times the mean.
    assert found[2] == pytest.approx(sum(1 / n for n in range(1, 9)), rel=0.05)


@pytest.mark.parametrize(
    ("samples", "options", "says"),
    [
        ([{"input_ids": [1, 2], "n": 5}, {"input_ids": [1] * 6, "n": 5}], "", "in tokens: mean 4, median 4, longest 6"),
        ([{"text": "ab", "id": 1}, {"text": "abcdef", "id": 2}], "", "in characters: mean 4, median 4, longest 6"),
        ([{"a": "ab", "b": "x"}, {"a": "abcdef", "b": "x"}], "--field a", "mean 4, median 4, longest 6"),
        ([[1, 2], [1] * 6], "--max-length 4", "mean 3, median 3, longest 4"),
        ([{"messages": [{"role": "u", "content": "abc"}]}] * 2, "", "mean 4, median 4, longest 4"),
    ],
)
def test_what_is_measured(
    samples: list[object], options: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, whole = tmp_path / "data.jsonl", tmp_path / "data.json"
    lines.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    whole.write_text(json.dumps(samples))
    for path in (lines, whole):
        assert in_this_process("padding", str(path), "--batch-size", "2", *options.split()) == 0
        said = capsys.readouterr().out
        assert says in said and "2 samples" in said and "without padding" in said


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("", "", "has 0 samples that are not empty, and --batch-size 8 asks for more; give a smaller one"),
        ("oh no", "", "line 1 is not JSON; give JSON or JSON lines"),
        ('[{"text": "a"}]', "--field txt", "--field txt is not in each sample; name one of text"),
        ('[{"text": "a"}, [1, 2]]', "", "some samples have tokens and some only texts"),
        ("[]", "--batch-size 0", "--batch-size 0 must be at least 1"),
        ("[]", "--max-length 0", "--max-length 0 must be at least 1"),
        (None, "", "No such file or directory; name another file"),
    ],
)
def test_mistakes_end_in_one_line(
    text: str | None, options: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.json"
    if text is not None:
        path.write_text(text)
    assert in_this_process("padding", str(path), *options.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and says in said and said.count("\n") == 1
