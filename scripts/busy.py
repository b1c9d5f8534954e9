"""
Run a command beside eight busy processes, and end with its status::

    python scripts/busy.py make test

A test that fails only beside this load has a lease, a lock or a timeout that is shorter than the machine is slow.
"""

import os
import subprocess
import sys

BUSY = 8
# Each ends by itself when its parent is gone, however that ended.
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"


def main(command: list[str]) -> int:
    if not command:
        print("Name the command to run beside the load: python scripts/busy.py make test", file=sys.stderr)
        return 2
    loads = [subprocess.Popen([sys.executable, "-I", "-S", "-c", LOOP]) for _ in range(BUSY)]
    try:
        status = subprocess.run(command, check=False).returncode
        idle = sum(load.poll() is not None for load in loads)
    except FileNotFoundError:
        print(f"there is no command {command[0]}", file=sys.stderr)
        return 127
    finally:
        for load in loads:
            load.kill()
            load.wait()
    if idle:
        print(
            f"{idle} of the {BUSY} busy processes had ended before the command, so it proves nothing", file=sys.stderr
        )
        return 1
    print(
        f"\nbeside {BUSY} busy processes on {os.cpu_count()} cores: {'ok' if status == 0 else f'exit status {status}'}"
    )
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
