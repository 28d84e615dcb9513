"""Run the tests that transformers and TRL have of their trainers with adaptive trainers in place of theirs.

    pip install -e '.[dev]' parameterized
    python benchmarks/others_tests.py --transformers DIR --trl DIR   # checkouts of both

Every trainer that a test makes, of whatever class, becomes ``adaptive(class)``: once with no settings, and once with
``micro_batch_size="auto"``. What passes with the trainers as they are has to pass with ours, or to be refused in a line
that says what works; nothing else is run with ours. It takes hours: with ``--folder``, tests that have ended are not
run again, even where a file was cut off, by ``--minutes`` or by hand; ``--only-report`` reports what has run so far.

transformers is the one installed, and TRL that of the checkout. Nothing is downloaded. TRL's tests get what its own
scripts make: its data sets, and its tiny models with random weights, with a tokenizer of bytes in place of theirs.
Tests that want something else from the hub fail in all three.

The last line printed is a JSON object.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from common import write_report

PACKAGES = ("torch", "transformers", "accelerate", "peft")
FROM_CHECKOUT = {"transformers": "tests", "trl": "tests and trainers"}
STOCK = "stock"
MODES: dict[str, dict[str, Any]] = {"none set": {}, "auto": {"micro_batch_size": "auto"}}
SUITES = {
    "transformers": [f"tests/trainer/test_{name}.py" for name in (
        "trainer", "trainer_accelerator", "trainer_callback", "trainer_checkpointing", "trainer_data",
        "trainer_evaluation", "trainer_hyperparameter", "trainer_optimizers", "trainer_seq2seq",
    )],
    "trl": [f"tests/test_{name}_trainer.py" for name in ("sft", "dpo", "reward", "kto", "grpo", "rloo", "distillation")]
    + [f"tests/experimental/test_{name}_trainer.py" for name in (
        "a2po", "async_grpo", "bco", "cpo", "distillation", "gkd", "gmpo", "gold", "grpo_with_replay_buffer",
        "gspo_token", "iw_opd", "minillm", "nash_md", "online_dpo", "orpo", "ppo", "prm", "sdft", "sdpo",
        "server_distillation", "ssd", "tpo", "xpo",
    )],
}  # fmt: skip
# Of transformers, that its newest versions no longer have and its tests still import.
RETIRED = ("GlueDataset", "GlueDataTrainingArguments", "LineByLineTextDataset", "TextDataset")
PASSED, REFUSED = "passed", "refused"
CALLBACKS = "the list of callbacks has one of ours"
WHY = {
    "test_custom_callback_added_at_init": CALLBACKS,
    "test_default_callbacks_are_present": CALLBACKS,
    "test_printer_callback_when_tqdm_disabled": CALLBACKS,
    "test_best_model_checkpoint_behavior": "the output folder has the record's as well",
    "test_save_best_checkpoint": "the output folder has the record's as well",
    "test_training_with_resume_from_checkpoint_false": "the model adds random numbers to its loss",
    "test_resume_training_with_different_batch_size": "the model adds random numbers to its loss",
}
"""Why a test ends otherwise, where its error does not say so."""
MINUTES = 5
"""Time limit of a test."""
NOT_RUN: list[str] = []
"""Files of tests that have not run in all modes."""
ENDED: list[float] = []
"""When files of tests ended, in seconds since 1970."""


def pytest_configure() -> None:
    """Put adaptive trainers in place of others, as a plugin of pytest."""
    sys.modules.setdefault("torchao", None)  # type: ignore  # PEFT takes no LoRA next to the torchao of torchtune
    import transformers
    import trl  # noqa: F401  (the checkout's, whatever is installed: pytest has put it first in sys.path)

    for name in RETIRED:
        if not hasattr(transformers, name):
            setattr(transformers, name, None)
    if os.environ["OTHERS_TESTS_MODE"] == STOCK:
        return
    from adaptive_batching._transformers.trainer import TakesSettings
    from adaptive_batching.transformers import AdaptiveArguments, adaptive

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(adaptive(cls))

    given = AdaptiveArguments(**MODES[os.environ["OTHERS_TESTS_MODE"]])
    transformers.Trainer.__new__ = make
    TakesSettings.__init__ = functools.partialmethod(TakesSettings.__init__, adaptive=given)  # type: ignore


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out tests that have ended, and with adaptive trainers those that do not pass without."""
    stock, result = (Path(os.environ[f"OTHERS_TESTS_{name}"]) for name in ("STOCK", "RESULT"))
    ended = set(read(result))
    counted = None if os.environ["OTHERS_TESTS_MODE"] == STOCK else set(_passing(read(stock)))
    left = [item for item in items if item.nodeid not in ended and (counted is None or item.nodeid in counted)]
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Have a test that does not end fail."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(60 * MINUTES)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"it takes more than {MINUTES} minutes")


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how each test ended."""
    if report.when == "call" or report.outcome != PASSED:
        crash = getattr(report.longrepr, "reprcrash", None)
        with Path(os.environ["OTHERS_TESTS_RESULT"]).open("a") as file:
            print(json.dumps([report.nodeid, report.outcome, getattr(crash, "message", "")]), file=file)


class Standins:
    """Makes the data sets and models of TRL's tests in a folder, by the scripts of its checkout."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self._checkout, self._folder = checkout, folder

    def make(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # or each file that is not there is asked for again and again
        import datasets
        import transformers

        sys.path.insert(0, str(self._checkout))
        saved: Any = datasets.DatasetDict
        saved.push_to_hub = lambda data, *args, **kwargs: self._save_data(data, *args, **kwargs)
        for name in ("zen", "harmony", "toolcall"):
            script = importlib.import_module(f"scripts.generate_{name}_dataset")
            script.main(0.1, True, f"trl-internal-testing/{name}")
        common: Any = importlib.import_module("scripts.generate_tiny_models._common")
        for name in ("check_transformers_version", "smoke_test", "check_dtype_pattern", "print_config_diff"):
            setattr(common, name, lambda *args, **kwargs: None)
        common.push_to_hub = self._save_model
        transformers.GenerationConfig.from_pretrained = lambda *args, **kwargs: transformers.GenerationConfig()
        transformers.AutoTokenizer.from_pretrained = self._tokenizer
        transformers.AutoConfig.from_pretrained = self._config
        for path in sorted((self._checkout / "scripts/generate_tiny_models").glob("for_*/*_for_*.py")):
            self._name = path.stem
            try:
                importlib.import_module(f"scripts.generate_tiny_models.{path.parent.name}.{path.stem}")
            except Exception as error:  # it wants something else from the hub: tests of it fail in all modes
                print(f"no {path.stem}: {str(error).strip().splitlines()[0]}")

    def _save_data(self, data: Any, name: str, config_name: str) -> None:
        folder = self._folder / name
        for split, rows in data.items():
            (folder / config_name).mkdir(parents=True, exist_ok=True)
            rows.to_parquet(folder / config_name / f"{split}.parquet")
        found = sorted(path.name for path in folder.iterdir() if path.is_dir())
        configs = [
            {"config_name": each, "data_files": [
                {"split": path.stem, "path": f"{each}/{path.name}"} for path in (folder / each).iterdir()
            ]} for each in found
        ]  # fmt: skip
        (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")

    def _save_model(self, model: Any, tokenizer: Any, _: Any, prefix: str = "", suffix: str = "") -> None:
        name = "-".join(filter(None, [prefix, type(model).__name__, suffix]))
        for each in (model, tokenizer):
            each.save_pretrained(self._folder / "trl-internal-testing" / name)

    def _config(self, _: str, **settings: Any) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(self._name.partition("_for_")[0], vocab_size=len(self._tokenizer()), **settings)

    def _tokenizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return a tokenizer of bytes, with the chat template of TRL whose name is most like the model's."""
        import trl
        from tokenizers import ByteLevelBPETokenizer
        from transformers import PreTrainedTokenizerFast

        def likeness(path: Path) -> tuple[int, int]:
            one, other = (name.replace("_", "") for name in (path.stem, self._name))
            alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
            return len(list(alike)), -len(one)

        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        bytelevel = ByteLevelBPETokenizer()
        bytelevel.train_from_iterator([], special_tokens=special)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bytelevel._tokenizer, eos_token=special[2], pad_token=special[0]
        )
        templates = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
        alike = max(templates, key=likeness)
        chosen = alike if likeness(alike)[0] >= 4 else alike.with_stem("qwen2_5")
        tokenizer.chat_template = chosen.read_text()
        return tokenizer


Ends = dict[str, tuple[str, str]]
"""How each test ends, and the first line of its error."""


def run(suite: str, checkout: Path, args: argparse.Namespace, folder: Path) -> dict[str, Ends]:
    """Return how each test of a suite ends in each mode; a file of tests counts as far as it has run in all of them."""
    found: dict[str, Ends] = {mode: {} for mode in (STOCK, *args.modes)}
    for path in (path for path in SUITES[suite] if (checkout / path).is_file()):
        results = {mode: folder / f"{suite}-{mode.replace(' ', '-')}-{Path(path).stem}.jsonl" for mode in found}
        if not args.only_report and (not args.files or any(name in Path(path).stem for name in args.files)):
            for mode, result in results.items():
                if not result.is_file():
                    run_file(path, checkout, mode, result, results[STOCK], args)
        ends = {mode: read(result) for mode, result in results.items()}
        # What passes with the trainers as they are counts where it has run with ours, too.
        passing = [name for name in _passing(ends[STOCK]) if all(name in each for each in ends.values())]
        if not all(result.is_file() for result in results.values()):
            NOT_RUN.append(f"{suite}: {path}" + (f", but for {len(passing)} tests" if passing else ""))
        ENDED.extend(result.stat().st_mtime for result in results.values() if passing and result.is_file())
        for mode, each in ends.items():
            found[mode] |= {name: each[name] for name in passing}
    return found


def read(result: Path) -> Ends:
    """Return how each test ended, or those that have so far."""
    found: Ends = {}
    file = result if result.is_file() else result.with_suffix(".part")
    for name, outcome, error in map(json.loads, file.read_text().splitlines() if file.is_file() else []):
        first = error.partition("\n")[0]
        # The second is where a test waits for another error than ours, which comes first.
        refusal = re.match(r".*ConfigError: (.*)", first) or re.search(r"Actual message: .(.*without adaptive)", error)
        if found.get(name, (PASSED,))[0] == PASSED:
            found[name] = (REFUSED, refusal[1]) if refusal else (outcome, first)
    return found


def _passing(ends: Ends) -> list[str]:
    return [name for name, (outcome, _) in ends.items() if outcome == PASSED]


def run_file(path: str, checkout: Path, mode: str, result: Path, stock: Path, args: argparse.Namespace) -> None:
    """Have pytest run a file of tests, and write how each ended to ``result`` once all have."""
    part = result.with_suffix(".part")
    here = str(Path(__file__).parent.resolve())
    paths = os.pathsep.join([here, str(Path(here).parent), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider",
        f"--rootdir={checkout}", *(["-k", args.k] if args.k else []), str(checkout / path),
    ]  # fmt: skip
    environment = {
        **os.environ, "PYTHONPATH": paths, "OTHERS_TESTS_MODE": mode, "OTHERS_TESTS_RESULT": str(part),
        "OTHERS_TESTS_STOCK": str(stock), "HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true",
    }  # fmt: skip
    print(f"{path} with {mode}", file=sys.stderr, flush=True)
    with result.with_suffix(".log").open("a") as log:
        tests = subprocess.Popen(command, cwd=result.parent, env=environment, stdout=log, stderr=log)
        try:
            tests.wait(args.minutes and 60 * args.minutes)
        except subprocess.TimeoutExpired:
            tests.kill()
            tests.wait()
            return
    # 0 or 1 if all tests ran, 5 if none was left to run.
    if tests.returncode in (0, 1, 5) and not args.k and (mode == STOCK or stock.is_file()):
        part.touch()
        part.rename(result)


def version_of(checkout: Path) -> str:
    """Return the version of a checkout."""
    if (named := checkout / "VERSION").is_file():
        return named.read_text().strip()
    found = re.search(r'^ *version="([^"]+)"', (checkout / "setup.py").read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def main() -> None:
    """Run the suites in each mode, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for suite in SUITES:
        parser.add_argument(f"--{suite}", type=Path, help=f"a checkout of {suite}")
    parser.add_argument(
        "--folder", type=Path, help="for what tests need and write, and what is there already; default: temporary"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], help="which settings; default: all")
    parser.add_argument("--only-report", action="store_true", help="run nothing, and report what --folder has")
    parser.add_argument("--files", nargs="+", default=[], help="run only files with one of these in their names")
    parser.add_argument("--minutes", type=float, help="for each file and setting; default: no limit")
    parser.add_argument("-k", default="", help="which tests, as pytest takes it; default: all")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/others_tests_cpu.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        found = {}
        for suite in SUITES:
            if checkout := getattr(args, suite):
                if suite == "trl" and not args.only_report and not (folder / "trl-internal-testing").is_dir():
                    Standins(checkout.resolve(), folder).make()
                found[suite] = run(suite, checkout.resolve(), args, folder)
    versions = [f"{suite}: {FROM_CHECKOUT[suite]} of {version_of(getattr(args, suite))}" for suite in found]
    report(args.output, found, versions)


def report(output: Path | None, found: dict[str, dict[str, Ends]], versions: list[str]) -> None:
    """Write what passes, what is refused, and each test that ends otherwise than with the trainers as they are."""
    rows = ["| tests of | settings | pass with the trainers as they are | of these pass | are refused | fail |",
            "|---" * 6 + "|"]  # fmt: skip
    differences: list[str] = []
    failed = Counter[str]()
    for suite, of in found.items():
        passing = _passing(of[STOCK])
        for mode in (mode for mode in of if mode != STOCK):
            ends = {name: of[mode].get(name, ("not run", "")) for name in passing}
            counts = Counter(outcome for outcome, _ in ends.values())
            others = len(passing) - counts[PASSED] - counts[REFUSED]
            rows.append(f"| {suite} | {mode} | {len(passing)} | {counts[PASSED]} | {counts[REFUSED]} | {others} |")
            failed[mode] += others
            for name, (outcome, error) in ends.items():
                if outcome != PASSED:
                    test = name.partition("::")[2]
                    why = WHY.get(re.sub(r"\[.*", "", test.rpartition("::")[2]), error)
                    differences.append(f"- {suite}, {mode}: `{test}` {outcome}: {why}")
    write_report(
        "Tests of transformers and TRL with adaptive trainers",
        device="cpu",
        facts=[
            *versions,
            *([f"ended between {_time(min(ENDED))} and {_time(max(ENDED))}"] if ENDED else []),
            "a test that fails as it is, mostly because it needs the hub, or is skipped, does not count",
            *(["not run: " + "; ".join(NOT_RUN)] if NOT_RUN else []),
        ],
        rows=[*rows, "", *differences],
        figures={f"fail_{mode.replace(' ', '_')}": failed[mode] for mode in failed},
        output=output,
        packages=PACKAGES,
    )


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC"


if __name__ == "__main__":
    main()
