"""Run a Python command, and interrupt it when time is up, so that it still says what it has done.

python -m tests.support.within <minutes> -m pytest ...
"""

from __future__ import annotations

import signal
import subprocess
import sys


def main() -> None:
    minutes, *arguments = sys.argv[1:]
    process = subprocess.Popen([sys.executable, *arguments])
    try:
        sys.exit(process.wait(timeout=60 * float(minutes)))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        print(f"interrupted after {minutes} minutes", file=sys.stderr)
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
        sys.exit(124)


if __name__ == "__main__":
    main()
