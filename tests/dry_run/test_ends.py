"""The condition on a value that ends a script, from its source."""

from __future__ import annotations

import re
import textwrap

import pytest

from adaptive_batching._dry_run.ends import condition_on_a_value

BREAKS = """
for step in range(100):
    loss = model(batch)
    loss.backward()
    optimizer.step()  # step
    if loss.item() < tolerance:  # read, found
        break
"""
NAMED = """
def train():
    history = []
    for batch in loader:
        take_step(batch)  # step
        value = float(loss)  # read
        history.append(2 * value)
        best = min(history)
        if best < tolerance: return  # found
"""
BY_FUNCTION = """
def is_done(loss):
    return loss.item() == 0  # read
while True:
    optimizer.step()  # step
    if is_done(loss):  # read, found
        sys.exit()
"""
WHILE = """
loss = None
while loss is None or loss > tolerance:  # found
    optimizer.step()  # step
    loss = compute().item()  # read
"""
COUNTS = """
while True:
    optimizer.step()  # step
    print(step, loss.item())  # read
    running = 0.9 * running + loss.item()  # read
    if step >= most:
        break
    if running > best:
        save()
"""
INNER = """
for epoch in range(3):
    for batch in loader:
        optimizer.step()  # step
    for batch in others:
        if evaluate(batch).item() > 1:  # read
            break
"""
HELPER = """
def clipped(norm):
    if norm.item() > 1:  # read
        return 1
    return norm
for batch in loader:
    optimizer.step()  # step
    clipped(norm)  # read
"""
SKIPS = """
if __name__ == "__main__": main()  # read
for batch in loader:
    loss = model(batch)
    if loss > 0:  # read, found
        loss.backward()
        optimizer.step()
"""
LOGS = """
for batch in loader:
    loss = model(batch)
    if loss.item() > 10:  # read
        print("large")
"""


def marked(code: str, word: str) -> set[int]:
    return {number for number, line in enumerate(code.splitlines(), 1) if re.search(rf"#.*\b{word}\b", line)}


@pytest.mark.parametrize("code", [BREAKS, NAMED, BY_FUNCTION, WHILE, COUNTS, INNER, HELPER, SKIPS, LOGS])
def test_a_condition_on_a_value_that_ends_training_is_found_and_no_other(code: str) -> None:
    found = condition_on_a_value(textwrap.dedent(code), marked(code, "read"), marked(code, "step"))
    assert found == next(iter(marked(code, "found")), None)


def test_a_file_that_is_no_python_has_no_condition() -> None:
    assert condition_on_a_value("def (", {1}, set()) is None
