"""Run a command on the emulated device: `python -m adaptive_batching._dry_run.device --memory 24GiB tune run ...`."""

from __future__ import annotations

import argparse
import os

from adaptive_batching._dry_run.device import EmulatedDevice, parse_capability
from adaptive_batching._mistakes import Parser, end
from adaptive_batching._values import AdaptiveBatchingError, MemoryAmount


def main() -> None:
    parser = Parser(prog="python -m adaptive_batching._dry_run.device", description=__doc__)
    parser.add_argument("--memory", default="80GiB", help="of each card (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="cards (default: %(default)s)")
    parser.add_argument("--capability", default="8.0", help="compute capability (default: %(default)s)")
    parser.add_argument("--lag", default="0", help="launches after which an event has happened, or 'host' (default: 0)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="to run, with its arguments")
    try:
        given = parser.parse_args()
        if not given.command:
            parser.error("which command shall run on the device?")
        if given.lag != "host" and not given.lag.isdigit():
            parser.error(f"--lag {given.lag} is no number of launches; write one, or 'host'")
        device = EmulatedDevice(
            memory_bytes=MemoryAmount.parse("--memory", given.memory).bytes_of(0),
            count=given.devices,
            capability=parse_capability(given.capability),
            lag=None if given.lag == "host" else int(given.lag),
        )
        environment = device.environment()
    except AdaptiveBatchingError as error:
        end(str(error))
    os.execvpe(given.command[0], given.command, environment)


if __name__ == "__main__":
    main()
