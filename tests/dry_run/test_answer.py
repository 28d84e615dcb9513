"""The answer of a dry run, from what its processes have left."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from adaptive_batching._dry_run.answer import Card, DryRun, Ending, as_object, read_dry_run
from adaptive_batching._dry_run.answer_in_words import in_words
from adaptive_batching._dry_run.cards import find_gpus
from adaptive_batching._dry_run.compared import Column
from adaptive_batching._dry_run.device.control import Counters
from adaptive_batching._dry_run.picture import write_page
from adaptive_batching._dry_run.process_work import Counts, ProcessWork
from adaptive_batching._dry_run.time.forecast import NO_LENGTH
from adaptive_batching._dry_run.time.step_work import StepWork
from adaptive_batching._dry_run.verdict import Answer
from tests.support.html import check_that_it_asks_for_nothing, read_page

GIB = 2**30
CARD = Card("RTX 4090", 24 * GIB, GIB // 2)
STEP = dict.fromkeys((field.name for field in fields(Counters)), 7)
HISTORY = {
    "peak_step": 2, "peak_line": "train.py:7 main", "peak_where": "models/llama.py:182 forward",
    "categories": {"weights": 3 * GIB, "activations": 7 * GIB},
    "holders": [{"category": "weights", "where": "train.py:3 main", "bytes": 3 * GIB, "allocations": 30}],
    "points": [
        {"event": 1, "allocated": 3 * GIB, "reserved": 3 * GIB, "weights": 3 * GIB},
        {"event": 9, "allocated": 10 * GIB, "reserved": 11 * GIB, "weights": 3 * GIB,
         "activations": 7 * GIB},
    ],
}  # fmt: skip
FAILED = {
    "device": 0, "asked_bytes": 2 * GIB, "step": 1, "time_us": 5, "in_backward": True, "line": "train.py:7 main",
    "where": "backward pass", "stack": [f"models/llama.py:{n} forward" for n in range(20)], "allocated_bytes": 1,
    "reserved_bytes": 1, "causes": [None, "input_ids is [1, 9]"], "in_training": True, "passes": 0, "started": 70,
    "in_probe": False,
}  # fmt: skip


def error(text: str, is_of_host_memory: bool = False, line: str | None = None) -> dict[str, Any]:
    return {"text": text, "is_of_host_memory": is_of_host_memory, "line": line, "is_of_script": line is not None}


def process(rank: int = 0, *, steps: int = 3, reserved: float = 11, **other: Any) -> dict[str, Any]:
    return {
        "process": 100 + rank, "rank": rank, "device": 0, "steps": [STEP] * steps,
        "peaks": {"allocated": 10 * GIB, "reserved": reserved * GIB, "retries": 0}, "out_of_memory": [],
        "history": HISTORY, "trouble": None, "error": None, "stopped": steps >= 3, "script": notes(),
        "card": rank, "taken": 0, "started": 90, "largest_input": None, "lacks": [], **other,
    }  # fmt: skip


def notes(**other: Any) -> dict[str, Any]:
    return {
        "optimizers": [], "passes": 0, "reads": [], "last_read": None, "exit": None, "of_steps": [], "idle": {},
        "stopped_early": None, "trains": False, **other,
    }  # fmt: skip


ENDED = Ending(0, False, 12.3)


def read(folder: Path, *processes: dict[str, Any], ending: Ending = ENDED, **how: Any) -> DryRun:
    for number, each in enumerate(processes):
        (folder / f"{number}.json").write_text(json.dumps(each))
    return read_dry_run(folder, CARD, ending, **how)


LATE = {**FAILED, "step": 4}
EVALUATING = {**LATE, "in_training": False}
SECOND = {**FAILED, "step": 2}
ON_ONE_CARD = {"card": 0, "taken": 24 * GIB - GIB // 4}


@pytest.mark.parametrize(
    ("processes", "code", "answer", "words"),
    [
        ([process()], 0, Answer.FITS, "3 steps|--whole runs all of it|matrix products 7|12.50 GiB of the card left"),
        ([process(), process(1, reserved=12)], 0, Answer.FITS, "rank 1 of 2"),
        ([process(reserved=23.4)], 0, Answer.TIGHT, "CUDA's context and NCCL may take up to"),
        ([process(peaks={"allocated": 1, "reserved": GIB, "retries": 2})], 0, Answer.TIGHT, "empty its cache 2 times"),
        ([process(steps=0, out_of_memory=[FAILED])], 1, Answer.DOES_NOT_FIT,
         "2.00 GiB asked for in the backward pass|because   input_ids is [1, 9]"),
        ([process(), process(1, out_of_memory=[LATE])], 1, Answer.DOES_NOT_FIT, "out of memory in step 4"),
        ([process(steps=0, out_of_memory=[FAILED])], 0, Answer.DOES_NOT_FIT, "out of memory in step 1"),  # it is caught
        ([process(out_of_memory=[FAILED])], 0, Answer.FITS, "ran out of memory once and went on"),
        ([process(steps=1, out_of_memory=[SECOND])], 0, Answer.DOES_NOT_FIT, "out of memory in step 2"),
        ([process(stopped=False, out_of_memory=[LATE])], 0, Answer.DOES_NOT_FIT, "out of memory in step 4"),
        ([process(stopped=False, out_of_memory=[EVALUATING])], 0, Answer.FITS, "ran out of memory once and went on"),
        ([process(stopped=False, started=70, out_of_memory=[EVALUATING])], 0, Answer.DOES_NOT_FIT, "in step 4"),
        ([process(steps=0, stopped=True, script=notes(passes=3), out_of_memory=[FAILED])], 0, Answer.FITS,
         "3 backward passes|ran out of memory once and went on"),
        ([process(**ON_ONE_CARD), process(1, **ON_ONE_CARD)], 0, Answer.TIGHT,
         "256 MiB of the card left|shared    by 2 processes, that are all on card 0"),
        ([process(largest_input={"name": "input_ids", "size": [8, 512]}, lacks=["convolutions"])], 0, Answer.FITS,
         "input_ids was at most [8, 512]|not in it workspaces of cuDNN, chosen on the card, for convolutions"),
        ([process(steps=0)], 0, Answer.FITS, "no optimizer of torch.optim took one"),
        ([process(error=error("ZeroDivisionError: x"))], 1, Answer.CANNOT_TELL, "losses are zero in a dry run"),
        ([process(error=error("AssertionError", line="a.py:3 f"), script=notes(reads=[["/x/a.py", 3]]))], 1,
         Answer.CANNOT_TELL, "losses are zero in a dry run"),
        ([process(steps=0, script=notes(optimizers=["AdamW, a.py:1 f"], passes=9, exit="a.py:9 f"))], 0,
         Answer.CANNOT_TELL, "ended by  a.py:9 f"),
        ([process(steps=0, stopped=True, script=notes(passes=3))], 0, Answer.FITS, "3 backward passes"),
        ([process(steps=0, stopped=True, script=notes(optimizers=["SGD"], idle={"SGD (a.py:1 f)": "no gradient"}))], 0,
         Answer.CANNOT_TELL, "the steps of SGD (a.py:1 f) did nothing: no gradient"),
        ([process(steps=0, script=notes(trains=True))], 0, Answer.CANNOT_TELL, "no backward pass"),
        ([process(), process(1, steps=0)], 0, Answer.FITS, "3 steps"),  # one that only asked for the device's name
        ([process(steps=1, out_of_memory=[FAILED])], 1, Answer.CANNOT_TELL, "exit code 1, and not"),
        ([process(steps=1, script=notes(exit="a.py:9 f"))], 1, Answer.CANNOT_TELL, "exit code 1, at a.py:9 f, and not"),
        ([process(steps=2)], 0, Answer.FITS, "ended     by itself, after 2 steps"),
        ([process(steps=0)], -9, Answer.CANNOT_TELL, "the host ran out of memory"),
        ([process(steps=0, error=error("KeyError: 'x'", line="a.py:3 f"))], 1, Answer.CANNOT_TELL,
         "because memory ran out: KeyError: 'x' (a.py:3 f)"),
        ([process(peaks={}, error=error("ChildFailedError: =")), process(error=error("KeyError: 1"))], 1,
         Answer.CANNOT_TELL, "memory ran out: KeyError: 1"),
        ([process(peaks={}, error=error("CalledProcessError: x"))], 2, Answer.CANNOT_TELL,
         "the launcher's command failed"),
        ([process(history={**HISTORY, "outdated_buckets_bytes": GIB})], 0, Answer.FITS,
         "1.00 GiB are the buckets that DDP began with"),
        ([process(peaks={}, error=error("MemoryError", True))], 1, Answer.CANNOT_TELL, "because the host ran out"),
        ([process(steps=0)], -11, Answer.CANNOT_TELL, "signal 11 (SIGSEGV)"),
        ([], 0, Answer.CANNOT_TELL, "used a CUDA device"),
        ([process(trouble="KeyError in _label: 1")], 0, Answer.FITS, "KeyError in _label"),
    ],
)  # fmt: skip
def test_the_answer_is_told_with_its_reason(
    processes: list[dict[str, Any]], code: int, answer: Answer, words: str, tmp_path: Path
) -> None:
    run = read(tmp_path, *processes, ending=replace(ENDED, exit_code=code))
    said = "\n".join(in_words(run))
    assert run.answer is answer and said.startswith(str(answer)) and all(each in said for each in words.split("|"))
    shown = as_object(run)
    assert shown["answer"] == str(answer) and shown["retries"] == run.retries and json.dumps(shown)
    assert shown["fits"] is {Answer.DOES_NOT_FIT: False, Answer.CANNOT_TELL: None}.get(answer, True)


def test_files_that_the_script_would_have_overwritten_are_named(tmp_path: Path) -> None:
    kept = ["/out/model.pt", "/out/log.txt"]
    ended, went_on = (read(tmp_path, process(), ending=replace(ENDED, exit_code=code), kept=kept) for code in (1, 0))
    assert ended.answer is Answer.CANNOT_TELL and "would overwrite /out/model.pt, which is kept" in in_words(ended)[0]
    assert went_on.answer is Answer.FITS and as_object(went_on)["kept_files"] == kept
    assert "/out/model.pt and 1 more, which the script would have" in "\n".join(in_words(went_on))


def test_that_no_time_is_known_is_told_with_the_reason_in_words_and_json(tmp_path: Path) -> None:
    reason = "it is recorded in one further step, and the script ended before that; set --steps 1"
    for notes_work, why in ((True, reason), (False, None)):
        run = read(tmp_path, process(steps=2, stopped=False), notes_work=notes_work)
        shown, said = as_object(run), "\n".join(in_words(run))
        assert shown["time"] is None and shown["why_no_time"] == why
        assert f"not known: {why}" in said if why else "not known" not in said


def test_a_step_that_asks_nothing_of_the_device_has_no_time(tmp_path: Path) -> None:
    work = ProcessWork(0, 1, StepWork([], []), Counts(samples=8), None)
    (tmp_path / "100.work").write_text(json.dumps({
        "rank": 0, "ranks": 1, "counts": asdict(work.counts), "trouble": None, **work.work.as_object(),
    }))  # fmt: skip
    card = replace(CARD, gpu=find_gpus("4090")[0])
    run = replace(read(tmp_path, process(), notes_work=True), card=card)
    assert run.forecast is None and as_object(run)["why_no_time"] == "the step ran nothing on the device"
    assert "not known: the step ran nothing on the device" in "\n".join(in_words(run))


def test_an_interrupted_run_tells_what_it_knows(tmp_path: Path) -> None:
    killed = process(steps=1, out_of_memory=[])
    del killed["history"]  # it was killed before it could write it
    run = read(tmp_path, killed, ending=Ending(-2, True, 12.3))
    said = in_words(run)
    assert said[0].startswith("cannot tell: interrupted (1 step") and "10.00 GiB allocated" in said[1]


def test_a_script_that_ended_by_a_condition_on_a_value_is_told_with_the_line_of_the_condition(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("for batch in data:\n    loss = step(batch)\n    if loss.item() < 0.1:\n        break\n")
    read_once = notes(reads=[[str(script), 3]], of_steps=[[str(script), 2]], optimizers=["SGD, train.py:1 <module>"])
    ended, stopped = (read(tmp_path, process(steps=1, stopped=each, script=read_once)) for each in (False, True))
    assert ended.answer is Answer.CANNOT_TELL and "ended by  train.py:3, a condition" in "\n".join(in_words(ended))
    assert stopped.answer is Answer.FITS


def test_a_script_that_takes_no_step_is_told_how_to_wait_longer(tmp_path: Path) -> None:
    run = read(tmp_path, process(steps=0), ending=Ending(-2, False, 301.0, waited=300))
    assert run.answer is Answer.CANNOT_TELL
    said = in_words(run)
    assert "no step in 300 s; --max-seconds" in said[0] and "10.00 GiB allocated" in said[1]


@pytest.mark.parametrize("failed", [False, True])
def test_the_page_has_the_answer_the_curve_and_what_held_the_memory(failed: bool, tmp_path: Path) -> None:
    given = process(steps=0, out_of_memory=[FAILED]) if failed else process()
    page = tmp_path / "page.html"
    run = read(tmp_path, given, ending=replace(ENDED, exit_code=int(failed)))
    secrets = ["--hub_token", "hf_0123456789", "--max_new_tokens", "50", "wandb.api_key=q9w8"]
    run = replace(run, errors=[error("KeyError: q9w8")])
    write_page([Column("card", None, NO_LENGTH, None)], [run], page, ["--", "python", "<train>.py", *secrets])
    shown = read_page(page)
    check_that_it_asks_for_nothing(shown)
    masked = "--hub_token '(masked)' --max_new_tokens 50 'wandb.api_key=(masked)'"
    assert shown.codes == [f"python '<train>.py' {masked}"] and "q9w8" not in page.read_text()
    assert "7.00 GiB" in shown.words["memory"] + shown.words["holders"]
    assert ("failure" in shown.words) == failed and ("asked" in shown.words) != failed
    assert [cells[0] for cells in shown.tables["holders"][0]] == ["kind", "weights", "activations"]
    assert ("polygon", "fill", "var(--c3)") in shown.attributes
