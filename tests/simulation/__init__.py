"""Clients, host and engine cores of an engine in one thread and in virtual time, with everything outside of them simulated.

The code that runs is that of `nbengine.client`, `nbengine.engine` and `nbengine.ipc`, unchanged. What it calls outside
(`time`, `os`, `threading`, `zmq`, `psutil`, `subprocess`, …) is substituted by a simulation of it (`substitutes`), and every
thread of every process is a greenlet. A seed decides who runs when, how long messages take, what users do, and which
faults occur (`faults`); after each event `invariants` looks whether anything has happened that never may.

`python -m tests.simulation SEED` replays a seed and prints what happens in it.
"""
