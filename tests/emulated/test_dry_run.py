"""Dry runs of scripts and recipes: what they take, where they fail, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torchtune.models.llama2 import llama2
from torchtune.models.mistral._component_builders import mistral_classifier

from tests.conftest import ROOT
from tests.support import vision

MIB = 2**20
WIDTH = 1024
LAYER = 4 * WIDTH * (WIDTH + 1)  # bytes of a layer's weights
MODEL = f"""
import torch
from torch import nn
WIDTH = {WIDTH}
def make(layers):
    with torch.device("cuda"):
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
"""
TRAIN = """
def main(layers=8, rows=64):
    model = make(layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(100):
        loss = model(torch.randn(rows, WIDTH, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, flush=True)
"""


def start(arguments: list[str], folder: Path, *, command: str = "dry-run", **options: Any) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EMULATED_DEVICE")}
    environment |= {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    del environment["LD_PRELOAD"]
    line = [sys.executable, "-m", "adaptive_batching", command, *arguments]
    return subprocess.Popen(
        line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def dry_run(folder: Path, *arguments: str, code: str | None = None) -> tuple[dict[str, Any], str]:
    """Return the object that a dry run prints, of a script after `MODEL` or of what is named, and what was said."""
    if code is not None:
        (folder / "train.py").write_text(MODEL + code)
        arguments = (*arguments, "--", "python", "train.py")
    process = start(["--json", *arguments], folder)
    printed, said = process.communicate(timeout=180)
    assert printed, said
    found = json.loads(printed)
    assert process.returncode == {"fits": 0, "does not fit": 1, "tight": 3, "cannot tell": 4}[found["answer"]]
    assert [path.name for path in folder.iterdir() if path.name.startswith("dry-run")] == [], "left behind"
    return found, said


def test_a_script_is_stopped_after_its_steps_and_its_peak_is_that_of_the_tensors(tmp_path: Path) -> None:
    found, said = dry_run(tmp_path, "--gpu", "4090", code=TRAIN + "main()")
    assert (found["fits"], found["steps"], found["retries"], found["card"]) == (True, 3, 0, "RTX 4090")
    assert (
        said.count("\nstep ") + said.startswith("step ") == 3
    )  # it ends within the fourth, in which its work is noted
    kinds = found["peak"]["categories"]
    layers = 8 * LAYER
    assert all(abs(kinds[name] - size) <= 32 * 512 for name, size in (("weights", layers), ("gradients", layers)))
    assert abs(kinds["optimizer states"] - 2 * layers) <= 64 * 512
    assert 4 * layers < found["peak_allocated_bytes"] < 4 * layers + 32 * MIB  # workspaces, and one tensor of a step
    assert found["peak_allocated_bytes"] <= found["peak_reserved_bytes"]
    assert found["peak"]["peak_line"] in ("train.py:15 main", "train.py:16 main", "train.py:14 main")
    assert found["asked_of_device"]["products"] == 3 * 8 - 1 and found["asked_of_device"]["synchronizations"] == 0


def test_an_allocation_that_fails_is_named_with_its_line_and_what_held_the_memory(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found, _ = dry_run(tmp_path, "--memory", "600MiB", "--page", str(page), code=TRAIN + "main(layers=8, rows=10000)")
    assert found["fits"] is False and found["steps"] == 0
    failed = found["failed_allocation"]
    assert not any(failed["causes"])
    assert 0 <= failed["asked_bytes"] - 4 * 10000 * WIDTH < 2 * MIB  # which torch's allocator rounds up to
    assert failed["step"] == 1 and not failed["in_backward"]
    assert failed["line"] == "train.py:13 main" and failed["stack"][0] == "modules/linear.py:134 forward"
    assert found["peak"]["categories"]["weights"] == pytest.approx(8 * LAYER, abs=32 * 512)
    assert found["peak"]["holders"][0]["where"] == "train.py:13 main" and "Where it failed" in page.read_text()


def test_an_allocation_that_fails_in_the_backward_pass_is_named_with_the_line_that_began_it(tmp_path: Path) -> None:
    found, _ = dry_run(tmp_path, "--memory", "740MiB", code=TRAIN + "main(layers=40, rows=8)")
    failed = found["failed_allocation"]
    assert found["fits"] is False and failed["in_backward"] and failed["line"] == "train.py:14 main"


def test_torch_and_nvidia_smi_tell_a_card_by_the_name_that_its_driver_gives(tmp_path: Path) -> None:
    code = """
import subprocess
print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).name, sep="|")
print(subprocess.check_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], text=True))
"""
    _, said = dry_run(tmp_path, "--gpu", "H100 80GB", code=code)
    name = "NVIDIA H100 80GB HBM3"
    assert f"{name}|{name}\n{name}\n" in said


def test_workspaces_of_cublas_are_named_whatever_their_size(tmp_path: Path) -> None:
    chosen = "import os\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:4'\n"
    found, _ = dry_run(tmp_path, "--gpu", "4090", "--steps", "2", code=chosen + TRAIN + "main(2)")
    assert found["peak"]["categories"]["cuBLAS workspaces"] == 2 * 16 * MIB  # one of each thread that computes


@pytest.mark.wide
def test_the_largest_batch_size_that_fits_is_found_by_dry_runs(tmp_path: Path) -> None:
    """Of a batch that holds 100 MiB a row, eight rows fit in a GiB beside CUDA's context, and nine do not."""
    code = """
import sys
held = torch.empty(int(sys.argv[1]) * 100 * 2**20, dtype=torch.uint8, device="cuda")
main(layers=1)
"""
    (tmp_path / "train.py").write_text(MODEL + TRAIN + code)
    line = ["--json", "--largest", "--memory", "1760MiB", "--steps", "1", "--", "python", "train.py", "{batch_size}"]
    process = start(line, tmp_path)
    printed, said = process.communicate(timeout=300)
    found = json.loads(printed)
    assert (process.returncode, found["largest"]) == (0, 8), said
    answers = {run["batch_size"]: run["answer"] for run in found["runs"]}
    assert [*answers] == [1, 2, 4, 8, 9, 10, 12, 16] and set(list(answers.values())[:4]) == {"fits"}
    assert "fits" not in list(answers.values())[4:] and answers[16] == "does not fit"


def test_what_a_script_survives_is_no_failure(tmp_path: Path) -> None:
    code = """
try:
    torch.empty(10**12, device="cuda")
except torch.OutOfMemoryError:
    torch.cuda.reset_peak_memory_stats()
held = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
del held
torch.cuda.reset_peak_memory_stats()
main(layers=1)
"""
    found, _ = dry_run(tmp_path, "--memory", "24", "--steps", "2", code=TRAIN + code)
    assert (found["fits"], found["steps"], found["out_of_memory_survived"]) == (True, 2, 1)
    assert found["peak_allocated_bytes"] >= 64 * MIB  # though the script has forgotten it


def test_a_script_that_catches_the_error_of_a_step_and_ends_as_if_all_were_well_does_not_fit(tmp_path: Path) -> None:
    code = (
        TRAIN.replace("rows, WIDTH", "rows if step == 0 else 10**6, WIDTH")
        + """
try:
    main(layers=2)
except torch.OutOfMemoryError as error:
    print("skipped:", error)
"""
    )
    found, said = dry_run(tmp_path, "--memory", "2", code=code)
    assert (found["fits"], found["steps"], found["exit_code"]) == (False, 1, 0) and "skipped: CUDA out of" in said
    assert found["failed_allocation"]["step"] == 2


def test_ranks_that_choose_no_card_end_as_with_nccl(tmp_path: Path) -> None:
    code = """
torch.distributed.init_process_group("nccl")
nn.parallel.DistributedDataParallel(make(1))
"""
    (tmp_path / "train.py").write_text(MODEL + code)
    shared_memory = set(Path("/dev/shm").iterdir())
    found, _ = dry_run(
        tmp_path, "--memory", "24", "--", "torchrun", "--standalone", "--nproc_per_node", "2", "train.py"
    )
    assert found["fits"] is None and "Duplicate GPU detected" in found["why"] and "CUDA device 1000" in found["why"]
    assert not [path for path in set(Path("/dev/shm").iterdir()) - shared_memory if "nccl" in path.name]


def test_processes_on_one_card_share_its_memory(tmp_path: Path) -> None:
    code = """
torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Unflatten(1, (1, 32, 32)), nn.Conv2d(1, 1, 3), nn.Flatten()).cuda()
held = torch.empty(600 * 2**20, dtype=torch.uint8, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
torch.distributed.barrier()
# In one write, which the other rank cannot tear where PYTHONUNBUFFERED is set
print(f"free: {torch.cuda.mem_get_info()[0]}\\n", end="", flush=True)
torch.distributed.barrier()
for _ in range(2):
    model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
"""
    (tmp_path / "train.py").write_text(MODEL + code)
    launch = ["--", "torchrun", "--standalone", "--nproc_per_node", "2", "train.py"]
    found, said = dry_run(tmp_path, "--memory", "3", "--devices", "1", "--steps", "1", *launch)
    free = [int(line.split()[1]) for line in said.splitlines() if line.startswith("free: ")]
    left = 3 * 1024 - 2 * (500 + 600)  # of two contexts and what both hold
    assert len(free) == 2 and all(left - 32 < each / MIB < left for each in free)
    assert 0 < found["left_bytes"] < left * MIB
    assert found["largest_input"]["size"] == [8, WIDTH] and found["lacks_workspaces_for"] == ["convolutions"]


def test_an_optimizer_for_each_parameter_and_workers_that_load_data_are_steps_and_no_more(tmp_path: Path) -> None:
    code = """
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    model = make(4)
    of = {p: torch.optim.AdamW([p]) for p in model.parameters()}
    for p in of:
        p.register_post_accumulate_grad_hook(lambda p: (of[p].step(), of[p].zero_grad()) and None)
    loader = DataLoader(TensorDataset(torch.randn(100, WIDTH)), batch_size=10, num_workers=2, pin_memory=True)
    for (batch,) in loader:
        print("batch", flush=True)
        model(batch.cuda(non_blocking=True)).sum().backward()
"""
    found, said = dry_run(tmp_path, "--memory", "24", code=code)
    assert (found["fits"], found["steps"], said.count("batch")) == (True, 3, 3)
    kinds = found["peak"]["categories"]
    assert kinds["optimizer states"] >= 8 * LAYER - 64 * 512 and kinds.get("gradients", 0) < 2 * LAYER


def test_ranks_train_together_and_the_one_that_fails_is_named(tmp_path: Path) -> None:
    code = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
torch.cuda.set_device(rank := dist.get_rank())
model = DistributedDataParallel(make(4).to(rank))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    rows = 10**6 if rank == 1 and step == 1 else 8
    model(torch.randn(rows, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    (tmp_path / "train.py").write_text(MODEL + code)
    launch = ["--", "torchrun", "--standalone", "--nproc_per_node", "2", "train.py"]
    found, _ = dry_run(tmp_path, "--memory", "80", *launch)
    assert (found["fits"], found["steps"], found["processes"]) == (True, 3, 2)
    assert found["asked_of_device"]["collectives"] >= 1 and found["peak"]["categories"]["DDP buckets"] >= 4 * LAYER
    found, _ = dry_run(tmp_path, "--memory", "4", "--devices", "2", *launch)
    assert found["fits"] is False and found["failed_allocation"]["step"] == 2
    assert found["failed_allocation"]["line"] == "train.py:17 <module>"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import torch; torch.zeros(1).cuda(); 1 / 0",
            "not because memory ran out: ZeroDivisionError: division by zero",
        ),
        ("import torch; torch.empty(2**55)", "because the host ran out of memory"),
        ("import torch, os; torch.zeros(1).cuda(); os.kill(os.getpid(), 9)", "the host ran out of memory"),
    ],
)
def test_a_script_that_ends_for_reasons_of_its_own_is_told_from_one_that_does_not_fit(
    code: str, words: str, tmp_path: Path
) -> None:
    process = start(["--memory", "24", "--", "python", "-c", code], tmp_path)
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 4 and words in printed, printed
    assert ("ZeroDivisionError" in said) == ("1 / 0" in code)


def test_of_a_launcher_s_script_that_never_imports_torch_the_error_is_the_script_s(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import no_such_module")
    found, said = dry_run(tmp_path, "--memory", "24", "--", "torchrun", "--standalone", "train.py")
    assert "ModuleNotFoundError: No module named 'no_such_module' (train.py:1 <module>)" in found["why"]
    assert "ChildFailedError" in said


def ends(*lines: str, optimizer: str = "AdamW") -> str:
    """Return a script of at most two steps, with such lines in its loop."""
    return f"""
model = make(2)
optimizer = torch.optim.{optimizer}(model.parameters())
def compute():
    optimizer.zero_grad()
    loss = model(torch.randn(8, WIDTH, device="cuda")).pow(2).mean()
    loss.backward()
    return loss
for step in range(2):
    {f"{chr(10)}    ".join(lines)}
"""


@pytest.mark.parametrize(
    ("code", "why", "condition"),
    [
        (ends("optimizer.step(compute)", optimizer="LBFGS"), "LBFGS (train.py:17 <module>) did nothing", None),
        (
            ends("loss = compute().item()", "if loss: optimizer.step()"),
            "the optimizer has taken no step (AdamW, train.py:10 <module>)", "train.py:18",
        ),
        (ends("value = compute().item()", "optimizer.step()", "if value < 1: break"), "of a value", "train.py:19"),
        (ends("print(compute().item())", "optimizer.step()", "if step > 8: break"), None, None),
    ],
    ids=["converges", "skips", "breaks", "ends"],
)  # fmt: skip
def test_what_trains_on_nothing_is_never_said_to_fit(
    code: str, why: str | None, condition: str | None, tmp_path: Path
) -> None:
    found, _ = dry_run(tmp_path, "--memory", "24", code=code)
    assert found["fits"] is (True if why is None else None) and found["ended_by"] == condition
    assert (why or "") in (found["why"] or "")


def test_a_callback_that_ends_training_for_want_of_progress_is_named(tmp_path: Path) -> None:
    code = """
from types import SimpleNamespace
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState
model = make(2)
optimizer = torch.optim.AdamW(model.parameters())
early, control = EarlyStoppingCallback(early_stopping_patience=1), TrainerControl()
args, state = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False), TrainerState(best_metric=0.0)
while not control.should_training_stop:
    loss = model(torch.randn(8, WIDTH, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    early.on_evaluate(args, state, control, metrics={"eval_loss": 0.0})
"""
    found, _ = dry_run(tmp_path, "--memory", "24", code=code)
    assert (found["fits"], found["steps"]) == (None, 1)
    assert found["ended_by"] == "EarlyStoppingCallback, train.py:19 <module>"


def test_a_script_with_an_optimizer_of_its_own_is_stopped_after_as_many_backward_passes(tmp_path: Path) -> None:
    code = """
model = make(2)
while True:
    model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
    for p in model.parameters():
        p.grad = None
"""
    found, _ = dry_run(tmp_path, "--memory", "24", code=code)
    assert (found["fits"], found["steps"], found["backward_passes"]) == (True, 0, 3)


@pytest.mark.wide
def test_a_script_that_takes_no_step_is_stopped_in_time_and_its_peak_is_told(tmp_path: Path) -> None:
    code = "import time\nmodel = make(2)\ntime.sleep(300)"
    found, _ = dry_run(tmp_path, "--memory", "24", "--max-seconds", "25", code=code)
    assert found["fits"] is None and "no step in 25 s" in found["why"] and found["peak_allocated_bytes"] >= 2 * LAYER


def test_the_whole_script_runs_if_asked_for(tmp_path: Path) -> None:
    code = TRAIN.replace("range(100)", "range(4)") + "main()\nmake(200)\n"
    found, said = dry_run(tmp_path, "--memory", "24", "--whole", code=code)
    assert (found["fits"], found["steps"]) == (True, 4) and said.count("\nstep ") + said.startswith("step ") == 4
    assert found["peak_allocated_bytes"] > 200 * LAYER


DRY = """
import os
import huggingface_hub
import wandb
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainingArguments
args = TrainingArguments("out", push_to_hub=True, hub_model_id="me/model", report_to="tensorboard")
print("hub:", args.push_to_hub, sorted(os.listdir(args.output_dir)))
api = huggingface_hub.HfApi()
print("made:", huggingface_hub.create_repo("me/model").repo_id, api.create_repo(repo_id="other").repo_id)
print("sent:", api.upload_folder(repo_id="me/model", folder_path=".", run_as_future=True).result().oid)
wandb.init(project="mine", mode="online")
SummaryWriter("runs").add_scalar("loss", 1.0)
torch.save({}, args.output_dir + "/model.pt")
try:
    torch.save({}, "out/model.pt")
except (OSError, RuntimeError):
    print("kept")
print({name: os.environ[name] for name in ("WANDB_MODE",)}, flush=True)
main(layers=1)
"""


def test_a_dry_run_sends_nothing_and_leaves_the_files_of_the_script_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "out" / "model.pt").write_text("trained for a week")
    (tmp_path / "wandb.py").write_text("def init(project, mode): print('wandb:', project, mode)")
    found, said = dry_run(tmp_path, "--memory", "24", "--steps", "1", code=TRAIN + DRY)
    assert found["fits"] is True, said
    assert "hub: False ['checkpoint-7']" in said and "made: me/model dry-run/other" in said and "sent: 0" in said
    assert "wandb: mine disabled" in said and "{'WANDB_MODE': 'disabled'}" in said and said.count("kept\n") == 1
    assert found["kept_files"] == [str(tmp_path / "out" / "model.pt")]
    assert (tmp_path / "out" / "model.pt").read_text() == "trained for a week"
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "__pycache__" not in str(path))
    assert files == ["out", "out/checkpoint-7", "out/model.pt", "train.py", "wandb.py"]


def test_a_script_that_overwrites_a_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text("{}")
    (tmp_path / "train.py").write_text("open('log.json', 'w').write('[]')")
    found, _ = dry_run(tmp_path, "--memory", "24", "--", "python", "train.py")
    assert found["fits"] is None and f"would overwrite {tmp_path / 'log.json'}, which is kept" in found["why"]
    assert "Read-only file system" in found["why"] and (tmp_path / "log.json").read_text() == "{}"


LONGER = """
from torch.utils.data import DataLoader
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make(2)
    def forward(self, rows, attention_mask=None):
        return self.layers(rows).sum()
def pad(samples):
    longest = max(samples)
    return {
        "rows": torch.randn(len(samples), longest, WIDTH),
        "attention_mask": (torch.arange(longest) < torch.tensor(samples)[:, None]).long(),
    }
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader([20000 if n == 13 else 8 for n in range(40)], batch_size=4, collate_fn=pad):
    model(**{name: x.cuda() for name, x in batch.items()}).backward()
    optimizer.step()
"""
LEAK = """
model = make(2)
optimizer, total = torch.optim.SGD(model.parameters(), lr=0.1), 0
for step in range(100):
    loss = model(torch.randn(4096, WIDTH, device="cuda")).sum()
    total = total + loss
    loss.backward(retain_graph=True)
    optimizer.step()
"""
PIECES = """
model = make(2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    held = [torch.empty(9 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(20)]
    model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    held = held[::2]
    torch.empty(60 * 2**20, dtype=torch.uint8, device="cuda")
"""


@pytest.mark.parametrize(
    ("code", "memory", "because"),
    [
        (LONGER, "800MiB", "rows is [4, 20000, 1024], and was at most [4, 8, 1024] in the steps before: number 13 of"),
        (LEAK, "900MiB", "more in use than step 3, and each since"),
        (PIECES, "780MiB", "more is unused but scattered"),
    ],
    ids=["longer", "leak", "pieces"],
)
def test_why_memory_ran_out_is_told_where_it_is_clear(code: str, memory: str, because: str, tmp_path: Path) -> None:
    found, _ = dry_run(tmp_path, "--memory", memory, "--steps", "90", code=code)
    [cause] = [cause for cause in found["failed_allocation"]["causes"] if cause is not None]
    assert found["fits"] is False and because in cause


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_script_and_all_that_it_has_started(by: signal.Signals, tmp_path: Path) -> None:
    """Also where a shell has started it in the background, with interrupts ignored, as here."""
    code = """
import subprocess, time, torch
from multiprocessing.shared_memory import SharedMemory
torch.zeros(2**20, device="cuda")
children = [subprocess.Popen(["sleep", "300"], start_new_session=own) for own in (False, True)]
shared = SharedMemory(create=True, size=8)
print(*[child.pid for child in children], shared.name, flush=True)
time.sleep(300)
"""
    (tmp_path / "train.py").write_text(code)
    process = start(
        ["--memory", "24", "--", "python", "train.py"], tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert process.stdout is not None
    *children, shared = process.stdout.readline().split()
    process.send_signal(by)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 4 and "cannot tell: interrupted" in printed and "4.0 MiB allocated" in printed
    assert not [child for child in children if is_running(child)], "a process of the script is left behind"
    assert not Path("/dev/shm", shared).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--memory 24 -- nosuchprogram", "nosuchprogram cannot be run"),
        ("--memory 24 -- deepspeed --num_gpus 40 x", "--devices 40 must be 1 to 16"),
        ("--memory 24 -- python -m accelerate.commands.launch --num_processes=40 x.py", "--devices 40 must be"),
        ("--memory 24 -- none/torchrun --nproc_per_node 2 x.py --num_processes 40", "none/torchrun cannot be run"),
        ("--memory 24 -- none/python x.py --num_processes 40", "none/python cannot be run"),
        ("--memory 24 lora_finetune_single_device --config llama3_2/1B_lora_single_device", "give --sequence-length"),
    ],
)
def test_a_mistake_ends_in_one_line(arguments: str, words: str, tmp_path: Path) -> None:
    process = start(arguments.split(), tmp_path)
    printed, said = process.communicate(timeout=120)
    line = said.strip().splitlines()[-1]
    assert process.returncode == 2 and not printed and line.startswith("error: ") and words in line, said


def test_a_script_that_loses_the_device_on_the_way_is_ended_before_it_finds_another(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('it runs')")
    found, said = dry_run(tmp_path, "--memory", "24", "--", "env", "-u", "LD_PRELOAD", "python", "train.py")
    assert found["fits"] is None and "the emulated device is not loaded" in found["why"] and "it runs" not in said


def test_without_a_compiler_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-compiler")
    _, said = (process := start(["--memory", "24", "--", "python", "x"], tmp_path)).communicate(timeout=60)
    assert process.returncode == 2 and "'no-compiler' is not there; install g++, or set CXX" in said


def test_a_recipe_needs_no_files_and_is_probed_for_real(tmp_path: Path) -> None:
    recipe = ["lora_finetune_single_device", "--config", "llama3_2/1B_lora_single_device"]
    options = ["--gpu", "4090", "--sequence-length", "512", "--steps", "2"]
    found, said = dry_run(tmp_path, *options, *recipe, "use_maximum_batch_size=True", "gradient_accumulation_steps=1")
    assert found["fits"] is True and found["steps"] == 2 and "maximum batch size" in said
    assert 0.5 * found["memory_bytes"] < found["peak_reserved_bytes"] < found["memory_bytes"]
    kinds = found["peak"]["categories"]
    assert kinds["weights"] == pytest.approx(2 * 1_278_281_728, rel=1e-3)  # bfloat16, adapters included
    assert kinds["optimizer states"] > 0 and found["out_of_memory_survived"] == 0, "of training, not of its probe"


SMALL = (
    "vocab_size=700", "num_layers=2", "num_heads=4", "num_kv_heads=2", "embed_dim=256", "intermediate_dim=512",
    "max_seq_len=512",
)  # fmt: skip


def ppo_models() -> list[nn.Module]:
    sizes = {key: int(value) for key, value in (each.split("=") for each in SMALL)}
    return [*[llama2(**sizes)] * 2, *[mistral_classifier(num_classes=1, **sizes)] * 2]


OF_PPO = [
    *(f"policy_model.{each}" for each in ("_component_=torchtune.models.llama2.llama2", *SMALL)),
    *(f"reward_and_value_model.{each}" for each in SMALL), "compile=False", "batch_size=8", "forward_batch_size=8",
    "ppo_batch_size=4", "max_generated_tokens=5", "num_steps=64",
]  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "make_models"),
    [
        (["ppo_full_finetune_single_device", "--config", "mistral/7B_full_ppo_low_memory", *OF_PPO], ppo_models),
        (
            ["full_finetune_single_device", "--config", "llama3_2_vision/11B_full_single_device", vision.OVERRIDES[0]],
            lambda: [vision.model()],
        ),
    ],
    ids=["reinforcement", "images"],
)
def test_recipes_of_other_kinds_need_no_files_either(
    recipe: list[str], make_models: Callable[[], list[nn.Module]], tmp_path: Path
) -> None:
    found, said = dry_run(tmp_path, "--memory", "4", "--sequence-length", "64", "--steps", "2", *recipe)
    assert found["fits"] is True and found["steps"] == 2, said
    of_models = sum(parameter.numel() for model in make_models() for parameter in model.parameters())
    assert found["peak"]["categories"]["weights"] == pytest.approx(2 * of_models, rel=0.05)  # bfloat16
