"""`%engine sleep`, `wake`, `pause`, `resume`, `reset` and `profile`: each does one thing and reports it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from nbengine.ipc.utilities import DEFAULT_PROFILE_STEPS, PAUSE_MODES, SLEEP_LEVELS, SLEEP_TAGS
from nbengine.magics.arguments import MagicParser
from nbengine.magics.engines.patience import told_if_slow
from nbengine.magics.engines.reports import Footprint, device_memory, resident_memory
from nbengine.magics.session import NotebookSession
from nbengine.widgets.words import count, seconds

_MODES_HELP = (
    "how to treat unfinished requests: abort ends them, wait lets those that have begun finish, keep holds them "
    "back until they can go on"
)


class ControlCommands:
    """The commands of `%engine` that suspend an engine or look into it."""

    def __init__(self, session: NotebookSession) -> None:
        self._session = session
        self.commands: dict[str, Callable[[Sequence[str]], None]] = {
            "sleep": self._sleep,
            "wake": self._wake,
            "pause": self._pause,
            "resume": self._resume,
            "reset": self._reset,
            "profile": self._profile,
        }

    def _sleep(self, words: Sequence[str]) -> None:
        parser = _parser(
            "sleep",
            "Give memory back without ending the engine: its KV cache, and the GPU's copy of the weights (level 1) or "
            "all of them (level 2). The next request of a notebook wakes it.",
        )
        parser.add_argument(
            "--level", type=int, choices=SLEEP_LEVELS, default=1, help="how deep (default: 1)"
        )
        parser.add_argument(
            "--mode",
            choices=PAUSE_MODES,
            help=_MODES_HELP + " (default: refuse to sleep while there are any)",
        )
        parser.add_argument(
            "--hold", action="store_true", help="keep it asleep: requests are refused until `%%engine wake`"
        )
        parsed = parser.parse_words(words)
        engine = self._session.get(parsed.name)
        info = engine.client.connection
        before = resident_memory(info)
        with told_if_slow(engine.client, "sleeps"):
            engine.client.control.sleep(parsed.level, parsed.mode, hold=parsed.hold)
        gone = Footprint(0, max(0, before - resident_memory(info)), device_memory(info))
        woken_by = "`%engine wake` wakes it" if parsed.hold else "`%engine wake` or the next request wakes it"
        print(f"engine {engine.name!r} sleeps: {gone} came back; {woken_by}")

    def _wake(self, words: Sequence[str]) -> None:
        parser = _parser("wake", "Take back the memory that `%engine sleep` gave up, and go on.")
        parser.add_argument(
            "--tag",
            action="append",
            choices=SLEEP_TAGS,
            help="restore only this; the rest follows with the next",
        )
        parsed = parser.parse_words(words)
        engine = self._session.get(parsed.name)
        began = time.monotonic()
        with told_if_slow(engine.client, "wakes up"):
            engine.client.control.wake_up(parsed.tag)
            state = "still sleeps, in part" if engine.client.control.is_sleeping() else "is awake"
        print(f"engine {engine.name!r} {state} after {seconds(time.monotonic() - began)}")

    def _pause(self, words: Sequence[str]) -> None:
        parser = _parser(
            "pause", "Hold all requests back, also those of other notebooks, until `%engine resume`."
        )
        parser.add_argument(
            "--mode", choices=PAUSE_MODES, default="abort", help=_MODES_HELP + " (default: abort)"
        )
        parser.add_argument("--keep-cache", action="store_true", help="do not forget the prefix cache")
        parsed = parser.parse_words(words)
        engine = self._session.get(parsed.name)
        with told_if_slow(engine.client, "pauses"):
            engine.client.control.pause_generation(parsed.mode, clear_cache=not parsed.keep_cache)
        print(f"engine {engine.name!r} is paused until `%engine resume`")

    def _resume(self, words: Sequence[str]) -> None:
        parser = _parser("resume", "Go on after `%engine pause`.")
        engine = self._session.get(parser.parse_words(words).name)
        with told_if_slow(engine.client, "goes on"):
            engine.client.control.resume_generation()
        print(f"engine {engine.name!r} goes on")

    def _reset(self, words: Sequence[str]) -> None:
        parser = _parser(
            "reset", "Forget the prefix cache, so that the next prompts are computed from their start."
        )
        parser.add_argument(
            "--running",
            action="store_true",
            help="also while requests run, which then compute their tokens again",
        )
        parsed = parser.parse_words(words)
        engine = self._session.get(parsed.name)
        with told_if_slow(engine.client, "forgets its prefix cache"):
            is_empty = engine.client.control.reset_prefix_cache(reset_running_requests=parsed.running)
        if is_empty:
            print(f"the prefix cache of engine {engine.name!r} is empty")
        else:
            print(
                f"the prefix cache of engine {engine.name!r} is in use: requests run; --running lets these start again"
            )

    def _profile(self, words: Sequence[str]) -> None:
        parser = MagicParser("%engine profile", "Record what the engine computes, as a Chrome trace.")
        parser.add_argument(
            "action", choices=("start", "stop"), help="begin, or write the trace and a summary"
        )
        parser.add_argument("name", nargs="?", help="engine (default: the last one started or attached)")
        parser.add_argument(
            "--dir", metavar="DIR", help="directory of the trace (default: nbengine-profiles)"
        )
        parser.add_argument(
            "--steps",
            type=int,
            metavar="N",
            default=DEFAULT_PROFILE_STEPS,
            help=f"most steps that are recorded (default: {DEFAULT_PROFILE_STEPS})",
        )
        parsed = parser.parse_words(words)
        engine = self._session.get(parsed.name)
        if parsed.action == "stop":
            with told_if_slow(engine.client, "writes its profile"):
                report = engine.client.control.stop_profile()
            print(report)
            return
        with told_if_slow(engine.client, "begins to record"):
            engine.client.control.start_profile(parsed.dir, max_steps=parsed.steps)
        print(
            f"engine {engine.name!r} records its next {count(parsed.steps, 'step')}; "
            "`%engine profile stop` writes the trace"
        )


def _parser(command: str, description: str) -> MagicParser:
    parser = MagicParser(f"%engine {command}", description)
    parser.add_argument("name", nargs="?", help="engine (default: the last one started or attached)")
    return parser
