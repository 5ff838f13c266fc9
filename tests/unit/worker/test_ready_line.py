"""The worker's standard output is for its ready line, and nobody else has it."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import os
from services.worker.__main__ import reserve_stdout

def goes_nowhere(number):
    try:
        os.fstat(number)
    except OSError:
        return True
    return False

announce = reserve_stdout()
number = announce.fileno()
nursery = os.fork()
if not nursery:
    tokenizer = os.fork()
    if not tokenizer:
        print("what a library says")
        os._exit(not goes_nowhere(number))
    os._exit(not goes_nowhere(number) or os.waitpid(tokenizer, 0)[1] != 0)
assert os.waitpid(nursery, 0)[1] == 0, "who reads it waits for them too"
print("ready", file=announce)
"""


def test_what_a_worker_has_forked_does_not_have_its_ready_line() -> None:
    ran = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "ready\n"), ran.stderr
