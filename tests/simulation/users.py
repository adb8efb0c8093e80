"""People start an engine or attach to it, each in a process of its own, send requests, abort some, and
leave."""

from __future__ import annotations

import contextlib
import functools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbengine.client.data_parallel import DPLBAsyncMPClient
from nbengine.client.engines import launch
from nbengine.client.link import leaving
from nbengine.client.mp import MPClient
from nbengine.client.sync_mp import SyncMPClient
from nbengine.errors import EngineDeadError, EngineStartError, LeaseExpiredError, NBEngineError
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from nbengine.runtime import connection
from nbengine.runtime.connection import ConnectionInfo
from nbengine.sampling_params import SamplingParams
from tests.simulation.executor import token_at
from tests.simulation.loop import SimLoopThread
from tests.simulation.primitives import SimEvent, SimQueue
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

ENGINE = "sim"
LOOK_INTERVAL = 0.05
RECOVERY_INTERVAL = 0.1


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that are sent together."""

    pause: float
    """Seconds of doing nothing before."""
    lengths: tuple[int, ...]
    """The number of tokens that each is to give."""
    aborted: frozenset[int] = frozenset()
    """The indices of those that are aborted once one of them has given a token."""
    asks: bool = False
    """A utility call is made beside them."""
    scale: int = 0
    """The number of engine cores that is asked for beside them; 0: none is."""


@dataclass(frozen=True, slots=True)
class UserPlan:
    """The plan of what one user does."""

    owner: bool
    is_async: bool
    begins: float
    rounds: tuple[Round, ...]
    leaves_by: str
    """`detach`, `shutdown`, `drain`, or `exit`: the process just ends."""
    lingers: float = 0.0
    """Seconds for which the process lives on after that."""


def draw_user(draw: random.Random, *, owner: bool, ranks: int) -> UserPlan:
    """Draw what a user does."""
    rounds = []
    for _ in range(draw.randint(1, 3)):
        lengths = tuple(draw.choice((1, 3, 8)) for _ in range(draw.randint(1, 3)))
        aborted = frozenset(index for index in range(len(lengths)) if draw.random() < 0.15)
        pause = draw.choice((0.0, 0.1, 1.0)) * draw.random()
        scale = draw.randint(1, 2) if draw.random() < 0.25 else 0
        rounds.append(Round(pause, lengths, aborted, draw.random() < 0.4, scale))
    leaves_by = draw.choice(
        ("shutdown", "shutdown", "drain", "detach", "exit") if owner else ("detach", "exit")
    )
    begins = 0.0 if owner else draw.random() * 3.0
    return UserPlan(
        owner, draw.random() < 0.5, begins, tuple(rounds), leaves_by, draw.choice((0.0, 0.0, 3.0, 20.0))
    )


@functools.cache
def _parameters(length: int) -> SamplingParams:
    """Make the parameters of a request for `length` tokens; a reader decodes an object of its own."""
    return SamplingParams(max_tokens=length, ignore_eos=True)


@dataclass(slots=True)
class Expected:
    """A request that has been sent."""

    prompt: list[int]
    length: int
    received: int = 0
    is_aborted: bool = False


@dataclass(slots=True)
class User:
    """A user, and what there is to know of the requests."""

    world: World
    name: str
    plan: UserPlan
    doing: str = "nothing yet"
    finished: bool = False
    process: Process | None = None
    client: MPClient | None = None
    outstanding: dict[str, Expected] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    """The way in which each request has ended."""
    _news: SimQueue[EngineCoreOutputs | NBEngineError | None] | None = None
    _number: int = 0

    def run(self, argv: list[str]) -> int:
        """Run the program of the user's process."""
        hub = self.world.hub
        process = self.process
        assert process is not None
        process.at_exit.append(leaving._leave_all)
        self.doing = "waiting for its time"
        hub.sleep(self.plan.begins)
        try:
            if self._begin():
                for part in self.plan.rounds:
                    self._do(part)
        except EngineDeadError as error:
            self._end_all(error)
        self._leave()
        self.doing = "lingering"
        hub.sleep(self.plan.lingers)
        self.finished = True
        return 0

    # The client.

    def _begin(self) -> bool:
        self.doing = "starting" if self.plan.owner else "attaching"
        try:
            info = self._info()
            if info is None:
                return False
            self.client = self._make_client(info)
            self.doing = "waiting until it is ready"
            self.client.wait_ready()
        except (EngineStartError, EngineDeadError) as error:
            self.world.judge.failed_start(self, error)
            if self.client is not None:
                self.client.abandon()
                self.client = None
            return False
        except NBEngineError as error:
            self.world.judge.failed_start(self, error)
            return False
        except OSError as error:
            # Known: a raw error of the operating system at a start.
            self.world.judge.failed_start(self, error)
            return False
        self.world.hub.say("ready")
        return True

    def _info(self) -> ConnectionInfo | None:
        if self.plan.owner:
            return launch.launch_engine(self.world.config, name=ENGINE)
        for _ in range(40):
            if connection.connection_file(ENGINE).exists():
                return connection.read_connection(connection.connection_file(ENGINE))
            if self.world.owner_is_gone:
                return None
            self.world.hub.sleep(LOOK_INTERVAL)
        return None

    def _make_client(self, info: ConnectionInfo) -> MPClient:
        if not self.plan.is_async:
            if not self.plan.owner:
                return SyncMPClient(info)
            with launch.discarded_on_error(info):
                return SyncMPClient(info, owns_engine=True)
        self._news = SimQueue()
        loop_thread: Any = SimLoopThread()
        client = DPLBAsyncMPClient(info, loop_thread, owns_engine=self.plan.owner)
        client.outputs.handler = self
        return client

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take in outputs, on the loop's thread."""
        assert self._news is not None
        self.world.pass_time("handle")
        self._news.put(outputs)

    def on_error(self, error: NBEngineError) -> None:
        """End what is outstanding, on the loop's thread."""
        assert self._news is not None
        # Those who have asked by now are told; a request that comes later has a lease of its own.
        for name in list(self.outstanding):
            self._end(name, error)
        self._news.put(None if isinstance(error, LeaseExpiredError) else error)

    # Requests.

    def _do(self, part: Round) -> None:
        client = self.client
        assert client is not None
        self.world.hub.sleep(part.pause)
        self._recover()
        names = [name for length in part.lengths if (name := self._send(length)) is not None]
        answer = client.submit_utility("stats") if part.asks else None
        scaled = None
        if part.scale:
            # The lease may have been lost by now.
            with contextlib.suppress(LeaseExpiredError):
                scaled = client.submit_scale(part.scale)
        aborts = {names[index] for index in sorted(part.aborted) if index < len(names)}
        while self.outstanding:
            self.doing = f"waiting for {', '.join(self.outstanding)}"
            self._take()
            aborts = {name for name in aborts if name in self.outstanding}
            if aborts and any(self.outstanding[name].received for name in aborts):
                for name in sorted(aborts):
                    self.outstanding[name].is_aborted = True
                client.abort_requests(sorted(aborts))
                for name in sorted(aborts):
                    self._end(name, None)
                aborts = set()
        for what, future in (("an answer", answer), ("the scaling", scaled)):
            if future is not None:
                self._await(what, future)

    def _recover(self) -> None:
        """Wait until requests are taken again after a lease was lost."""
        assert self.client is not None
        while True:
            try:
                self.client.check_alive()
            except LeaseExpiredError:
                self.doing = "waiting for a new lease"
                self.world.hub.sleep(RECOVERY_INTERVAL)
            else:
                return

    def _send(self, length: int) -> str | None:
        client = self.client
        assert client is not None
        self._number += 1
        name = f"{self.name}.{self._number}"
        prompt = [(len(name) * 31 + self._number) % 997, 1, 2, self._number]
        self.outstanding[name] = Expected(prompt, length)
        try:
            client.add_request(EngineCoreRequest(name, prompt, _parameters(length)))
        except LeaseExpiredError:
            # It was not sent.
            self.outstanding.pop(name, None)
            return None
        self.world.hub.say(f"sent {name}")
        return name

    def _take(self) -> None:
        """Take in what comes next."""
        client = self.client
        if isinstance(client, SyncMPClient):
            try:
                self._take_in(client.get_output())
            except LeaseExpiredError as error:
                self._end_all(error)
            return
        assert self._news is not None
        news = self._news.get()
        if isinstance(news, NBEngineError):
            raise news
        if news is not None:
            self._take_in(news)

    def _take_in(self, outputs: EngineCoreOutputs) -> None:
        judge = self.world.judge
        for name in outputs.finished_requests or ():
            judge.expect(name in self.ended, f"{name} ended without a word")
        for output in outputs.outputs:
            expected = self.outstanding.get(output.request_id)
            if expected is None:
                how = self.ended.get(output.request_id)
                # What was under way when it was aborted, or failed, comes after that.
                judge.expect(
                    how is not None and how != "tokens", f"{output.request_id}: more after its end ({how})"
                )
                continue
            self._take_output(expected, output)

    def _take_output(self, expected: Expected, output: EngineCoreOutput) -> None:
        judge, name = self.world.judge, output.request_id
        for token in output.new_token_ids:
            right = token_at(expected.prompt, expected.received)
            judge.expect(token == right, f"{name}: token {expected.received} is {token}, not {right}")
            expected.received += 1
        if output.finish_reason is None:
            return
        if output.finish_reason is FinishReason.LENGTH:
            judge.expect(
                expected.received == expected.length,
                f"{name} ended with {expected.received} tokens of {expected.length}",
            )
            self._end(name, None)
        else:
            judge.failed_request(self, name, f"{output.finish_reason}: {output.error}", output.lost_rank)
            self._end(name, NBEngineError(output.error or "aborted"), judged=True)

    def _end_all(self, error: NBEngineError) -> None:
        for name in list(self.outstanding):
            self._end(name, error)
        if not isinstance(error, LeaseExpiredError):
            self.world.judge.engine_died(self, error)

    def _end(self, name: str, error: NBEngineError | None, *, judged: bool = False) -> None:
        expected = self.outstanding.pop(name, None)
        judge = self.world.judge
        judge.expect(name not in self.ended, f"{name} ends a second time, after {self.ended.get(name)}")
        if expected is None:
            return
        self.ended[name] = "tokens" if error is None and not expected.is_aborted else str(error or "aborted")
        self.world.hub.say(f"{name} has ended: {self.ended[name]}")
        if error is not None and not judged and not isinstance(error, EngineDeadError):
            judge.failed_request(self, name, str(error), None)

    def _await(self, what: str, future: Any) -> None:
        self.doing = f"waiting for {what}"
        done = SimEvent()
        future.add_done_callback(lambda _: done.set())
        done.wait()
        error = future.exception()
        if error is not None:
            self.world.hub.say(f"{what}: {error}")

    # The end.

    def _leave(self) -> None:
        client, how = self.client, self.plan.leaves_by
        if client is None or how == "exit":
            return
        self.doing = f"leaving by {how}"
        if how == "detach":
            client.detach()
            return
        self.world.judge.asked_to_end = True
        client.shutdown(drain=how == "drain")
        self.world.judge.after_shutdown(self)
