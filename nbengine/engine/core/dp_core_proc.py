"""DPEngineCoreProc: an engine core in lock step, whose workers need the experts of other cores' workers."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import zmq

from nbengine.config import EngineConfig
from nbengine.engine.core.activity import Activity
from nbengine.engine.core.core_proc import EngineCoreProc, EngineShutdownState
from nbengine.engine.core.step_in_flight import StepInFlight
from nbengine.engine.core.step_pace import StepPace
from nbengine.engine.core.waves import Standing, Verdict, WaveState, conclude, greatest_wave
from nbengine.engine.core.work import COORDINATOR_INDEX, StartWave
from nbengine.executor.base import Executor
from nbengine.ipc.control_messages import ChangeGroup, EngineHandshakeMetadata, GroupChanged
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.metrics.stats import SchedulerStats
from nbengine.scheduler.output import SchedulerOutput

if TYPE_CHECKING:
    from types import FrameType

    from nbengine.runtime.executor_files import ExecutorFiles


logger = logging.getLogger(__name__)


class DPEngineCoreProc(EngineCoreProc):
    """An engine core that steps together with the others, in waves; see `nbengine.engine.core.waves`.

    Up to `batch_queue_size` batches are in flight, as in other cores, dummy ones included. A step that has
    nothing to compute and waits for one in flight is no turn: the batch that it waits for needs nobody's next
    batch.

    A core that is asked to end goes on taking part until all of them are to end and have no requests left. A
    core that alone is to end (SIGTERM, or its host is gone) does not wait for that, and leaves the others
    without it.
    """

    # The coordinator makes snapshots of what all cores have told of a turn.
    stats_interval = 0.0

    def __init__(
        self,
        config: EngineConfig,
        executor_class: type[Executor],
        rank: int,
        context: zmq.Context[zmq.Socket[bytes]],
        control: zmq.Socket[bytes],
        handshake: EngineHandshakeMetadata,
        files: ExecutorFiles | None = None,
        activity: Activity | None = None,
    ) -> None:
        parallel = config.parallel
        self.waves = WaveState(
            parallel.data_parallel_size, rank, joins_later=parallel.data_parallel_joins_later
        )
        super().__init__(config, executor_class, rank, context, control, handshake, files, activity)
        self._dummy_batches: deque[Future[Any]] = deque()
        self._num_dummy_steps = 0
        self._change: ChangeGroup | None = None
        self._leaves_alone = False
        self._has_left = False
        self.control.is_needed = lambda: self.waves.running
        self._handlers |= {
            StartWave: lambda item: self.waves.announce(item.wave),
            ChangeGroup: self._prepare_change,
        }

    # The busy loop.

    def has_work(self) -> bool:
        """Tell whether there is a turn to take, a wave to begin, or something to tell the workers."""
        if self.waves.running or self.batch_queue or self.waves.can_begin(self._standing()):
            return True
        if not self.waves.has_joined:
            return self._change is not None
        return self.scheduler.has_requests() and not self.scheduler.has_runnable_requests()

    def _process_engine_step(self) -> None:
        if not self.waves.has_joined:
            self._change_group()
        elif not self.waves.running:
            begun = self.waves.begin(self._standing())
            if begun is not None:
                self._tell_coordinator(EngineCoreOutputs(start_wave=begun))
        if self.waves.agreement_due:
            self._agree()
        if self.waves.running:
            self._take_turn()
        elif not self.scheduler.has_runnable_requests():
            super()._process_engine_step()

    def _take_turn(self) -> None:
        num_turns = self.waves.num_turns
        if self.batch_queue or self.scheduler.has_requests():
            self._step()
        else:
            self._drop_aborts()
            self.control.advance()
            if self.trace.has_events:
                self._publish_stats(at_rest=True)
        if self.waves.num_turns == num_turns and not self.batch_queue:
            self._start_dummy_batch()

    def post_step(self, model_executed: bool) -> None:
        """Count the turn, then do what every engine core does after a step."""
        if model_executed:
            self.waves.count_turn()
        super().post_step(model_executed)

    def _start(self, plan: SchedulerOutput) -> StepInFlight:
        step = super()._start(plan)
        if self.waves.running and not plan.total_num_scheduled_tokens:
            # All that could be planned is in flight already, but the others go on filling their pipelines.
            self._start_dummy_batch()
        return step

    def _start_dummy_batch(self) -> None:
        if self.waves.num_ranks > 1:
            self._dummy_batches.append(self.model_executor.execute_dummy_batch())
            self._num_dummy_steps += 1
            while len(self._dummy_batches) >= self.batch_queue_size:
                self._dummy_batches.popleft().result()
        self.waves.count_turn()

    # Agreements.

    def _standing(self) -> Standing:
        return Standing(
            has_work=self.scheduler.has_runnable_requests(),
            is_asleep=self.control.is_asleep,
            is_ready=self._is_ready,
            is_leaving=self._is_leaving,
        )

    def _agree(self) -> None:
        standing = self._standing()
        verdict = conclude(self.waves.agreement(standing), self._any_rank)
        while self._dummy_batches:
            self._dummy_batches.popleft().result()
        if verdict is not Verdict.RUN:
            self._end_wave()
        self._has_left = verdict is Verdict.LEAVE
        if verdict is Verdict.REGROUP:
            self._change_group()
        if not standing.has_work:
            self._publish_stats(at_rest=True)

    def _any_rank(self, flag: bool) -> bool:
        return flag if self.waves.num_ranks == 1 else self.model_executor.all_reduce_unfinished(flag)

    def _end_wave(self) -> None:
        """Take in the steps in flight for aborted requests, and make the changes that had to wait."""
        while self.batch_queue:
            self._send_outputs(self._finish_oldest())
        # The verdict is the same for all, so one speaks for all; the wave's number has been counted on.
        if self.engine_index == 0:
            self._tell_coordinator(EngineCoreOutputs(wave_complete=self.waves.wave - 1))
        self.control.advance()

    def _tell_coordinator(self, news: EngineCoreOutputs) -> None:
        self.output_queue.put((COORDINATOR_INDEX, news))

    def step_stats(self) -> SchedulerStats:
        """Return the state of scheduler, KV cache and workers, and of the wave."""
        stats = super().step_stats()
        stats.current_wave = self.waves.wave
        stats.step_counter = self.waves.num_turns
        stats.engines_running = self.waves.running
        stats.num_dummy_steps = self._num_dummy_steps
        return stats

    # Changes of the number of cores.

    def _prepare_change(self, change: ChangeGroup) -> None:
        self._change = change

    @property
    def _is_ready(self) -> bool:
        if self._change is None:
            return False
        stays = self.engine_index < self._change.after
        return stays or not self.scheduler.has_unfinished_requests()

    def _change_group(self) -> None:
        """Carry out the change of the number of cores that all of them know of, if there is one."""
        change, self._change = self._change, None
        if change is None:
            return
        self._activity.begin("call", "reconfigure_data_parallel")
        self.model_executor.reconfigure_data_parallel(change.before, change.after, change.init_method)
        self.waves.num_ranks = change.after
        # One core alone may compute several steps at once.
        self._pace = StepPace(self.model_executor.most_steps)
        self.waves.has_joined = self.engine_index < change.after
        self._has_left = not self.waves.has_joined
        if self.waves.has_joined:
            wave = conclude(greatest_wave(self.waves.wave), self._any_rank)
            self.waves.joined(change.after, wave)
            self._input_thread.tell_host(GroupChanged(self.engine_index, change.after))
        logger.info("engine core %d: there are %d in lock step now", self.engine_index, change.after)

    # The end.

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """End at once, and alone: the handler of SIGTERM."""
        self._leaves_alone = True
        super().on_sigterm(signum, frame)

    def on_host_gone(self) -> None:
        """Tell the clients that this is the end, then end: without the coordinator no wave would begin."""
        self._leaves_alone = True
        super().on_host_gone()

    @property
    def _is_leaving(self) -> bool:
        is_asked = self.shutdown_state is EngineShutdownState.SHUTTING_DOWN
        return is_asked and not self.scheduler.has_unfinished_requests()

    def _handle_shutdown(self) -> bool:
        # Requests that are held up would have to wait for somebody to wake the engine.
        self._drain = self._drain and not self.waves.is_held_up
        goes_on = super()._handle_shutdown()
        if goes_on or self._leaves_alone or (self._is_alone and self._change is None):
            return goes_on
        return not self._has_left

    @property
    def _is_alone(self) -> bool:
        return self.waves.num_ranks == 1 or not self.waves.has_joined
