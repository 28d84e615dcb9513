"""Records of made-up runs, written by the report itself."""

from __future__ import annotations

from typing import Any

from adaptive_batching._growth.batch_size_schedule import PlannedEpoch
from adaptive_batching._probe.sizes import Measurement, ProbeResult
from adaptive_batching._report.events import StepCost
from adaptive_batching._report.record import Report
from tests.support.examples import RESULT

PROBED: dict[str, Any] = {
    "event": "probe", "sequence_length": 128, "waited": 3.25,
    **ProbeResult(
        batch_size=32, reason="memory", budget_bytes=1593835520, total_bytes=25276510208, search="predict",
        seconds=3.25, measurements=[Measurement(8, True, 593207296, 0.28), Measurement(32, True, 1120505856, 0.89)],
        predicted=[(8, 733003776), (32, 1120505856), (33, 1136651776), (64, 1637175296)],
    ).to_dict(),
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "output_dir": "outputs/run",
    "batch_size": 4,
    "use_maximum_batch_size": True,
    "batch_increase_function": {"_component_": "adaptive_batching.growth.step", "every": 1},
    "micro_batch_size": None,
    "adaptive_batching": {"memory_limit": "1.5GiB", "max_batch_size": None},
    "model": {"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
}
VERSIONS: dict[str, Any] = {"processor": "Z80, 1 cores", "versions": {"torch": "2.9", "torchtune": "0.6.1"}}
EXPLORED: list[dict[str, Any]] = [
    {"candidate": 1, "runs": 4, "seconds": 0.512, "speedup": 1.0, "confidence": 0.0},
    {"candidate": 4, "runs": 9, "seconds": 0.301, "speedup": 1.7, "confidence": 0.99},
    {"candidate": "auto", "runs": 8, "seconds": 0.35, "speedup": 1.46, "confidence": 0.03},
]


def about(**changes: Any) -> dict[str, Any]:
    """What a record says of a run before it begins."""
    config = {**CONFIG, **changes}
    return {
        "adaptive_batching": "0.1.0", "recipe": "Recipe", "model": "lora_llama3_2_1b", "device": "cpu", "ranks": 1,
        "config": config, **VERSIONS,
    }  # fmt: skip


def start_epoch(report: Report, epoch: int, batch_size: int, steps: int, reason: str = "kept") -> None:
    report.epoch(
        epoch=epoch, step=steps * epoch, batch_size=batch_size, global_batch_size=2 * batch_size, steps=steps,
        samples=2 * batch_size * steps, dropped_samples=3, reason=reason,
    )  # fmt: skip


def write_run(
    report: Report, epochs: range = range(3), steps: int = 4, *, all_there_is: bool = True, ends: bool = True
) -> None:
    """Record a run whose batch doubles each epoch, and which runs out of memory once in the second."""
    if all_there_is:
        report.probe(RESULT, sequence_length=64, waited=1.5)
        report.exploration(recommended=EXPLORED[1], estimates=EXPLORED, noise=0.02)
        planned = [PlannedEpoch(e, [4 * 2**e], [8 * 2**e], steps, 8 * 2**e * steps, 3, 1e-4) for e in epochs]
        report.plan(planned, decided=True)
    for epoch in epochs:
        size = 4 * 2**epoch
        start_epoch(report, epoch, size, steps, "kept" if epoch == 0 else f"<lambda> added {size // 2}")
        for number in range(1, steps + 1):
            step = steps * epoch + number
            if all_there_is:
                report.cost(StepCost(0.25 * 2**epoch, epoch + 1, 1000 * size, 1300 * size, (100 + step) * 2**20))
            if all_there_is and step == steps + 1:
                report.recovery(epoch=epoch, step=step, failed="with 8 samples of up to 40 tokens", max_tokens=160)
            report.step(epoch, step, 2 * size, 8.0 - 0.25 * step, 1e-3 / step, recoveries=int(step > steps))
            if all_there_is and step % 3 == 0:
                report.validation(epoch, step, 9.0 + (step - 6) ** 2)
        if all_there_is:
            report.took(what="checkpoint", epoch=epoch, step=steps * (epoch + 1), seconds=0.5)
    if ends:
        report.end()
