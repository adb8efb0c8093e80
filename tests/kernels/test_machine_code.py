"""A process finds on the disk what the one before it has compiled."""

from __future__ import annotations

import os
import subprocess
import sys

KEYS = '''
import sys
from nbengine.kernels.cpu import all_reduce, flags, jit, program, rows
from nbengine.kernels.cpu.codegen import Element

class Asked(Exception):
    """The store has been asked, and there is no need to compile."""

class Store:
    def get(self, key):
        print(key)
        raise Asked

jit.keep_machine_code(Store())
for compiled in (
    lambda: flags.compile_flags(),
    lambda: all_reduce.compile_all_reduce(2, Element.FLOAT32),
    lambda: all_reduce.compile_all_gather(2),
    lambda: rows.compile_gather_rows(2),
    lambda: rows.compile_reduce_scatter_rows(2, Element.FLOAT32),
    lambda: program._compile_program(),
):
    try:
        compiled()
    except Asked:
        continue
    raise AssertionError("compiled without a key")
'''


def keys_in_a_new_process(hash_seed: int) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    result = subprocess.run(
        [sys.executable, "-c", KEYS], env=environment, check=True, capture_output=True, text=True
    )
    return result.stdout.split()


def test_two_processes_have_the_same_code_for_what_waits_and_exchanges() -> None:
    first = keys_in_a_new_process(1)
    assert len(first) == 6
    assert keys_in_a_new_process(2) == first
