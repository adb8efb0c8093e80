"""A forked child owns nothing of its parent's engine, and can have one of its own or become a client of the parent's."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable

import psutil

Script = Callable[[str], subprocess.Popen]

SCRIPT = """
import asyncio, gc, json, multiprocessing, os, sys, warnings
from nbengine import LLM, AsyncLLM, SamplingParams
# What Python says of forks in processes with threads is what this is about.
warnings.simplefilter("ignore", DeprecationWarning)
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5]}

def generate(llm):
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

def stream(llm):
    async def read():
        async for output in llm.generate(PROMPT, GREEDY):
            tokens = output.outputs[0].token_ids
        return tokens
    return asyncio.run(read())

def attach():
    other = AsyncLLM.attach(name)
    tokens = stream(other)
    other.detach()
    return tokens

def make():
    # It ends with the child.
    return generate(LLM(**OPTIONS))

def leave_block():
    with llm:
        return "left"

def forget():
    global llm, other
    llm = other = None
    gc.collect()
    return "forgotten"

def answer(function):
    try:
        return [function()]
    except Exception as error:
        return [type(error).__name__, str(error)]

def tell(case, function):
    print(json.dumps([case, os.getpid(), *answer(function)]), flush=True)

def in_fork(cases):
    pid = os.fork()
    if pid == 0:
        for case, function in cases.items():
            tell(case, function)
        # The interpreter's exit, with all that was registered for it.
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0

llm = LLM(**OPTIONS)
name = llm.llm_engine.connection.name
other = AsyncLLM.attach(name)
print(json.dumps(["pids", os.getpid(), llm.llm_engine.connection.host_pid]), flush=True)
in_fork({
    "generate": lambda: generate(llm), "stats": lambda: llm.stats(), "shutdown": lambda: llm.shutdown(),
    "add": lambda: llm.llm_engine.add_request("r", PROMPT, GREEDY), "stream": lambda: stream(other),
    "async stats": lambda: asyncio.run(other.stats()), "detach": lambda: other.detach(),
    "abort": lambda: asyncio.run(other.abort("r")), "async shutdown": lambda: other.shutdown(),
    "leave block": leave_block,
})
tell("between", lambda: [generate(llm), stream(other)])
in_fork({"attach": attach, "forget": forget, "make": make})
child = multiprocessing.get_context("fork").Process(target=tell, args=("process", lambda: generate(llm)))
child.start()
child.join()
tell("parent", lambda: [generate(llm), stream(other)])
other.detach()
llm.shutdown()
"""


def test_a_forked_child_refuses_its_parents_engine_by_name_and_harms_nothing(script: Script) -> None:
    process = script(SCRIPT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    parent, host = lines[0][1:]
    answers = {case: (pid, rest) for case, pid, *rest in lines[1:]}
    tokens = [6, 7, 8]
    assert answers.pop("between") == answers.pop("parent") == (parent, [[tokens, tokens]])
    assert [answers.pop(case)[1] for case in ("attach", "make", "leave block", "forget")] == [
        [tokens],
        [tokens],
        ["left"],
        ["forgotten"],
    ]
    assert len(answers) == 10
    for pid, answer in answers.values():
        assert answer[0] == "NBEngineError"
        assert re.match(rf"this engine belongs to process {parent}, .* \({pid}\) is a fork", answer[1])
        assert "AsyncLLM.attach" in answer[1]
    assert not psutil.pid_exists(host)
    # No thread, finalizer or exit of a child had anything to complain about.
    assert "Error" not in err
