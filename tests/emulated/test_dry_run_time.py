"""Seconds of a step in dry runs: what is noted is what runs, and memory is told as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adaptive_batching._dry_run.cards import find_gpus
from adaptive_batching._dry_run.time.seconds import CONSTANTS, sustained
from tests.emulated.test_dry_run import MODEL, TRAIN, WIDTH, dry_run, start

ROWS = 8192
LINEAR = 2 * ROWS * WIDTH * WIDTH  # operations of a layer's forward pass
SCRIPT = f"{TRAIN}\nmain(layers=8, rows={ROWS})"
BIG = "torch.set_default_dtype(torch.bfloat16)\n" + SCRIPT.replace("foreach=False", "fused=True")
OF_MEMORY = ("fits", "peak_allocated_bytes", "peak_reserved_bytes", "retries", "steps", "peak")
GRAPH = """
model, rows = make(2), torch.randn(8, WIDTH, device="cuda")
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
def step():
    optimizer.zero_grad()
    model(rows).sum().backward()
    optimizer.step()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    step()
torch.cuda.synchronize()
run = step
if GRAPH:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    run = graph.replay
for number in range(100):
    run()
    print("ran", flush=True)
"""


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dry_run(
        tmp_path_factory.mktemp("timed"), "--gpu", "A100-40GB", "--price", "2", "--steps-in-all", "9000", code=SCRIPT
    )[0]


def test_a_step_takes_what_its_products_take_and_is_told_by_the_lines_that_ask(timed: dict[str, Any]) -> None:
    time, [gpu] = timed["time"], find_gpus("A100-40GB")
    products = (3 * 8 - 1) * LINEAR  # the first layer's input needs no gradient
    least = products / (sustained(gpu, "float32") * 1e12 * CONSTANTS.product)
    share = time["limits"]["matrix products"]
    assert least < share * time["seconds_per_step"] < 1.2 * least
    [line] = time["lines"]["matrix products"]
    assert line["where"] == "train.py:13 main"
    assert line["seconds"] == pytest.approx(share * time["seconds_per_step"], rel=0.01)
    assert "train.py:15 main" in [line["where"] for line in time["lines"]["memory traffic"]]  # the optimizer
    assert (time["samples_per_step"], time["tokens_per_step"], time["devices"]) == (ROWS, 0, 1)
    assert time["hours"] == pytest.approx(9000 * time["seconds_per_step"] / 3600)
    assert time["cost"] == pytest.approx(2 * time["hours"])


def test_memory_is_told_as_where_no_time_is(timed: dict[str, Any], tmp_path: Path) -> None:
    without, said = dry_run(tmp_path, "--gpu", "A100-40GB", "--no-time", code=SCRIPT)
    assert without["time"] is None and said.count("\nstep ") + said.startswith("step ") == 2
    assert {key: without[key] for key in OF_MEMORY} == {key: timed[key] for key in OF_MEMORY}


def test_a_graph_asks_for_what_it_has_captured_each_time_that_it_is_replayed(tmp_path: Path) -> None:
    times = {}
    for name in ("True", "False"):
        found, said = dry_run(tmp_path, "--gpu", "4090", code=GRAPH.replace("GRAPH", name))
        assert (found["fits"], found["steps"], said.count("ran")) == (True, 3, 2)
        assert found["asked_of_device"]["products"] == 3 * 2 - 1
        times[name] = found["time"]["seconds_per_step"] * (1 - found["time"]["limits"].get("launches on the host", 0))
    assert times["True"] == pytest.approx(times["False"], rel=0.1)


@pytest.mark.parametrize(
    "code", ["if step == 3: raise ValueError('later')", "if step == 3: break", "if step == 3: make(9000)"]
)
def test_however_the_step_ends_in_which_work_is_noted_the_answer_stands(code: str, tmp_path: Path) -> None:
    code = TRAIN.replace("        loss = model", f"        {code}\n        loss = model") + "main()"
    found, _ = dry_run(tmp_path, "--gpu", "4090", code=code)
    assert found["fits"] is True and found["steps"] == 3 and found["time"] is None


def test_an_optimizer_in_the_backward_pass_ends_the_step_that_is_noted(tmp_path: Path) -> None:
    code = f"""
model = make(4)
of = {{p: torch.optim.AdamW([p]) for p in model.parameters()}}
for p in of:
    p.register_post_accumulate_grad_hook(lambda p: (of[p].step(), of[p].zero_grad()) and None)
for step in range(100):
    model(torch.randn({ROWS}, WIDTH, device="cuda")).sum().backward()
"""
    found, _ = dry_run(tmp_path, "--gpu", "4090", code=code)
    products = found["time"]["limits"]["matrix products"] * found["time"]["seconds_per_step"]
    least = (3 * 4 - 1) * LINEAR / (sustained(find_gpus("4090")[0], "float32") * 1e12 * CONSTANTS.product)
    assert least < products < 1.2 * least


@pytest.mark.wide
def test_cards_and_sizes_are_compared(tmp_path: Path) -> None:
    code = "import sys\n" + BIG.replace(f"rows={ROWS}", "rows=int(sys.argv[1])")
    (tmp_path / "train.py").write_text(MODEL + code)
    command = ["--", "python", "train.py"]
    found, _ = dry_runs(tmp_path, "--gpu", "4090", "--gpu", "H100", "--price", "0.4", "--price", "9", *command, "4096")
    assert [run["name"] for run in found["runs"]] == ["RTX 4090", "H100"]
    assert (found["fastest"], found["cheapest"]) == ("H100", "RTX 4090")
    found, _ = dry_runs(tmp_path, "--gpu", "4090", "--batch-sizes", "64,16384,32768", *command, "{batch_size}")
    rates = [run["time"]["samples_per_second"] for run in found["runs"]]
    assert [run["batch_size"] for run in found["runs"]] == [64, 16384, 32768] and found["enough"] == 16384
    assert rates[1] > 2 * rates[0] and rates[2] < 1.02 * rates[1]


def test_a_record_of_a_real_run_corrects_what_is_predicted(timed: dict[str, Any], tmp_path: Path) -> None:
    measured = 1.25 * timed["time"]["seconds_per_step"]
    steps = [{"event": "step", "epoch": 0, "step": n, "seconds": measured} for n in range(9)]
    record = tmp_path / "report.jsonl"
    record.write_text("\n".join(map(json.dumps, [{"event": "run", "version": 1}, *steps])))
    found, _ = dry_run(tmp_path, "--gpu", "A100-40GB", "--calibrate", str(record), code=SCRIPT)
    assert found["time"]["seconds_per_step"] == pytest.approx(measured, rel=0.01)
    card = found["time"]["correction"]["card"]
    assert card == pytest.approx(1.25, rel=0.02)
    found, _ = dry_run(tmp_path, "--gpu", "A100-40GB", "--correction", f"card={card}", code=SCRIPT)
    assert found["time"]["seconds_per_step"] == pytest.approx(measured, rel=0.01)


def dry_runs(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return the object that several dry runs print, and what was said besides."""
    printed, said = start(["--json", *arguments], folder).communicate(timeout=180)
    assert printed, said
    found: dict[str, Any] = json.loads(printed)
    return found, said
