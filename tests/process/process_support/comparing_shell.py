"""A notebook's kernel that compares many rows: `comparing_shell.py ROWS KILLED AFTER`; it prints its rows as JSON.

When `AFTER` requests have ended in it, it kills what `KILLED` names: "itself", the "engine" that it asks, or "nothing".
"""

from __future__ import annotations

import json
import os
import signal
import sys

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbengine.client.engines.directory import list_engines
from nbengine.client.engines.processes import session_processes
from nbengine.magics.comparison import sending
from nbengine.magics.extension import load

NAME = "rows"
ROOM = 16
"""The most requests that the engine has at once: when it is killed it cannot have answered all, however slow the kernel is."""
LINE = "%%generate --raw --each row=rows --temperature 0 --max-tokens 4 --resume -o grid\nSay {row}"


def main(number: str, killed: str, after: str) -> None:
    config = Config()
    config.HistoryManager.enabled = False
    config.NBEngine.spare_engine = False
    shell = InteractiveShell.instance(config=config)
    load(shell)
    engines = [engine.info for engine in list_engines() if engine.pids]
    line = (
        f"attach {NAME}" if engines else f"start random-tiny --name {NAME} --num-blocks 512 --max-num-seqs 8"
    )
    shell.run_cell(f"%engine {line}").raise_error()
    ended = sending.Sender.ended
    count = 0

    def counted(sender: sending.Sender, position: int) -> None:
        nonlocal count
        ended(sender, position)
        count += 1
        if count != int(after):
            return
        if killed == "itself":
            os.kill(os.getpid(), signal.SIGKILL)
        elif killed == "engine":
            [info] = [engine.info for engine in list_engines()]
            for pid in [process.pid for process in session_processes(info)]:
                os.kill(pid, signal.SIGKILL)

    sending.Sender.ended = counted  # type: ignore[method-assign]
    sending.LEAST_ROOM = ROOM
    shell.user_ns["rows"] = [f"number {row}" for row in range(int(number))]
    failed = shell.run_cell(LINE).error_in_exec
    grid = shell.user_ns["grid"]
    said = {"error": str(failed or ""), "rows": grid.rows(), "failed": len(grid.errors)}
    print("\n" + json.dumps(said))


main(*sys.argv[1:])
