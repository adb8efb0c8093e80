"""The dashboard's protocol as a reader understands it, written from its text alone."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DecodedStep:
    step: int
    time: float
    seconds: float | None
    figures: tuple[int, int, int, int]
    """Running, waiting, free blocks, cached blocks."""
    entries: list[tuple[int, int, int, int]]
    preempted: list[int]
    finished: list[int]


@dataclass
class DecodedRank:
    info: dict[str, Any] = field(default_factory=dict)
    steps: list[DecodedStep] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Numbers of steps that were known when something was lost."""
    words: list[int] = field(default_factory=list)
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)


STATUS = (
    "state",
    "num_cached_tokens",
    "num_preemptions",
    "first_token_at",
    "ended_at",
    "finish_reason",
    "own",
    "foreground",
)
PROGRESS = ("num_computed_tokens", "num_output_tokens")
UNCHANGING = {
    "number",
    "id",
    "client",
    "num_prompt_tokens",
    "max_total_tokens",
    "added_at",
    "preview",
}


class FrameDecoder:
    """The knowledge of a script after the frames that it has got, each through JSON."""

    def __init__(self) -> None:
        self.seq: int | None = None
        self.frame: dict[str, Any] = {}
        self.ranks: dict[int, DecodedRank] = {}
        self.spans: list[dict[str, Any]] = []
        self.full_maps = 0

    def take(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        frame = json.loads(json.dumps(content))
        assert frame["kind"] == "frame"
        if frame["reset"]:
            self.ranks, self.spans = {}, []
        else:
            assert self.seq is not None
            assert frame["seq"] == self.seq + 1
        self.seq, self.frame = frame["seq"], frame
        for info in frame["ranks"]:
            self._take_rank(self.ranks.setdefault(info["rank"], DecodedRank()), info, buffers)
        for rank in self.ranks.keys() - {info["rank"] for info in frame["ranks"]}:
            del self.ranks[rank]
        if frame["waves"]["reset"]:
            self.spans = []
        self.spans += frame["waves"]["spans"]

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Return the rows of the table, in its order."""
        rows = [
            {**row, "rank": rank} for rank, known in self.ranks.items() for row in known.requests.values()
        ]
        rows.sort(key=lambda row: (row["rank"], row["number"]))
        unfinished = [row for row in rows if row["state"] != "finished"]
        ended = [row for row in rows if row["state"] == "finished"]
        ended.sort(key=lambda row: row["ended_at"] or 0, reverse=True)
        return sorted(unfinished, key=lambda row: row["added_at"]) + ended

    def _take_rank(self, rank: DecodedRank, info: dict[str, Any], buffers: list[bytes]) -> None:
        rank.info = info
        if info["history_lost"]:
            rank.cuts.append(len(rank.steps))
        for item in info["steps"]:
            if item[1] is None:
                self._complete(rank, item)
            else:
                self._append(rank, item)
        if info["requests"] is not None:
            self._take_requests(rank.requests, **info["requests"])
        if info["blocks"] is not None:
            data = buffers[info["blocks"]["buffer"]]
            words = list(struct.unpack(f"<{len(data) // 4}I", data))
            if info["blocks"]["full"]:
                self.full_maps += 1
                rank.words = words
            else:
                for block, word in zip(words[::2], words[1::2], strict=True):
                    rank.words[block] = word

    def _take_requests(
        self,
        known: dict[int, dict[str, Any]],
        gone: list[int],
        new: list[dict[str, Any]],
        status: list[list[Any]],
        progress: list[int],
        texts: list[list[Any]],
    ) -> None:
        assert gone or new or status or progress or texts, "nothing has changed"
        for number in gone:
            del known[number]
        for row in new:
            assert set(row) == UNCHANGING
            known[row["number"]] = dict(row)
        for number, *values in status:
            known[number] |= dict(zip(STATUS, values, strict=True))
        for number, *values in zip(*(progress[at::3] for at in range(3)), strict=True):
            known[number] |= dict(zip(PROGRESS, values, strict=True))
        for number, text in texts:
            known[number]["text"] = text
        complete = UNCHANGING | set(STATUS) | set(PROGRESS)
        assert all(set(row) - {"text"} == complete for row in known.values())

    def _append(self, rank: DecodedRank, item: list[Any]) -> None:
        step, time, seconds, *figures, entries, preempted, finished = item
        if entries is None:
            assert rank.steps
            assert rank.cuts[-1:] != [len(rank.steps)], "nothing to go on from"
            numbers = [number for number, *_ in rank.steps[-1].entries]
            decoded = [(number, 1, 0, -1) for number in numbers]
        else:
            decoded = [tuple(entries[at : at + 4]) for at in range(0, len(entries), 4)]
        rank.steps.append(
            DecodedStep(step, time, seconds, tuple(figures), decoded, preempted or [], finished or [])
        )

    def _complete(self, rank: DecodedRank, item: list[Any]) -> None:
        step, _, seconds, finished = item
        (known,) = [known for known in rank.steps[-40:] if known.step == step]
        known.seconds, known.finished = seconds, finished or []


def unpacked(word: int) -> tuple[int, bool, int]:
    """Return a block's references, whether it is cached, and the holder's number."""
    return word & 0xFFF, bool(word >> 12 & 1), word >> 13
