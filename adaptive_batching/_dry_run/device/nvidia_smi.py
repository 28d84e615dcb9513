"""Answer as `nvidia-smi` does, for the emulated cards: a program of its own, of nothing but the standard library.

Scripts ask it for a card's name and for free memory. What is in use is what the processes of a dry run have last
written down, and zero elsewhere. What nobody can know here, such as a temperature, is ``[N/A]``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

MIB = 2**20
DRIVER = "580.65"
UNITS = {"memory": " MiB", "utilization": " %"}


def main(arguments: list[str]) -> int:
    options = dict(argument.lstrip("-").partition("=")[::2] for argument in arguments)
    count = int(os.environ["EMULATED_DEVICE_COUNT"])
    chosen = options.get("id") or next((value for name, value in itertools.pairwise(arguments) if name == "-i"), None)
    devices = [int(number) for number in chosen.split(",") if number.isdigit()] if chosen else [*range(count)]
    devices = [device for device in devices if device < count]
    if not devices:
        print("No devices were found")
        return 6
    cards = [_card(device) for device in devices]
    asked = options.get("query-gpu")
    if asked is not None:
        _print_table(asked, options.get("format", "csv"), cards)
    elif "query-compute-apps" in options:
        used = [
            {"pid": str(process), "used_memory": str(size // MIB), "process_name": "python", "gpu_uuid": card["uuid"]}
            for device, card in zip(devices, cards, strict=True)
            for process, size in _in_use(device)
        ]
        _print_table(options["query-compute-apps"], options.get("format", "csv"), used)
    elif "L" in options or "list-gpus" in options:
        for card in cards:
            print(f"GPU {card['index']}: {card['name']} (UUID: {card['uuid']})")
    else:
        _print_overview(cards)
    return 0


def _card(device: int) -> dict[str, str]:
    """Return the fields of a card, by their names in ``--query-gpu``."""
    total = int(os.environ["EMULATED_DEVICE_MEMORY"])
    used = min(sum(size for _, size in _in_use(device)), total)
    capability = int(os.environ["EMULATED_DEVICE_CAPABILITY"])
    name = os.environ.get("EMULATED_DEVICE_NAME") or "emulated device"
    uuid, bus = f"GPU-00000000-0000-0000-0000-{device:012d}", f"00000000:{device + 1:02X}:00.0"
    return {
        "index": str(device), "count": os.environ["EMULATED_DEVICE_COUNT"], "driver_version": DRIVER,
        "name": name, "gpu_name": name, "uuid": uuid, "gpu_uuid": uuid, "pci.bus_id": bus, "gpu_bus_id": bus,
        "compute_cap": f"{capability // 10}.{capability % 10}", "compute_mode": "Default",
        "memory.total": str(total // MIB), "memory.used": str(used // MIB), "memory.free": str((total - used) // MIB),
        "memory.reserved": "0", "utilization.gpu": "0", "utilization.memory": "0", "mig.mode.current": "Disabled",
    }  # fmt: skip


def _in_use(device: int) -> list[tuple[int, int]]:
    """Return the processes that use a card, each with the bytes that it has last written down."""
    folder = os.environ.get("ADAPTIVE_BATCHING_DRY_RUN")
    used = []
    for path in sorted(Path(folder).glob("*.json")) if folder else []:
        process = json.loads(path.read_text())
        reserved = process.get("reserved_now", {}).get(str(device))
        if reserved and Path(f"/proc/{process['process']}").exists():
            used.append((process["process"], reserved + int(os.environ["EMULATED_DEVICE_CONTEXT"])))
    return used


def _print_table(asked: str, form: str, rows: list[dict[str, str]]) -> None:
    names = [name.strip() for name in asked.split(",")]
    choices = [choice.strip() for choice in form.split(",")]

    def unit(name: str) -> str:
        return UNITS.get("memory" if name == "used_memory" else name.split(".")[0], "")

    def cell(row: dict[str, str], name: str) -> str:
        return row[name] + ("" if "nounits" in choices else unit(name)) if name in row else "[N/A]"

    if "noheader" not in choices:
        bracketed = (name + (f" [{unit(name).strip()}]" if unit(name) else "") for name in names)
        print(", ".join(bracketed))
    for row in rows:
        print(", ".join(cell(row, name) for name in names))


def _print_overview(cards: list[dict[str, str]]) -> None:
    line, version = "+" + "-" * 89 + "+", os.environ.get("EMULATED_DEVICE_CUDA", "")
    first = f"NVIDIA-SMI {DRIVER}    Driver Version: {DRIVER}    CUDA Version: {version}    (emulated)"
    print(f"{line}\n| {first:<87} |\n{line}")
    for card in cards:
        memory = f"{card['memory.used']}MiB / {card['memory.total']}MiB"
        print(f"| {card['index']:>2}  {card['name']:<29} {card['pci.bus_id']}  {memory:>20}  {'0%   Default':>13} |")
    print(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
