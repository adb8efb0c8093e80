"""What the dashboard's kernel side sends to its script in the browser, at most five times a second.

A frame is a custom message of the widget: JSON content, with binary buffers beside it. `FrameBuilder` makes those of one
widget; a *reset* frame stands by itself, the others say what has changed since the one before (the script asks for a reset
frame, `{"kind": "hello"}`, when it is mounted and when a frame's `seq` is not the one after the last).

```
{"kind": "frame", "seq": 7, "reset": false, "time": 1700000000.0,
 "engine": {"name", "model", "topology", "device", "dtype", "lock_step", "state", "note"},
 "rates":  {"tokens_in_per_second", "tokens_out_per_second", "time_to_first_token", "inter_token_latency",
            "memory_bytes"},                                   # numbers, or null: nothing is known
 "ranks": [{"rank": 0, "alive": true, "num_running", "num_waiting", "num_preemptions", "num_blocks", "num_free_blocks",
            "num_cached_blocks", "block_size", "prefix_cache_queries", "prefix_cache_hits", "step", "wave", "is_paused",
            "sleep_level", "max_num_batched_tokens", "max_num_seqs",
            "workers": [{"rank", "memory_bytes", "num_steps", "step_seconds"}],
            "history_lost": false,                             # true: the steps below are not connected with earlier ones
            "steps": [STEP, ...],                              # new ones, and older ones whose `seconds` are known now
            "blocks": null | {"buffer": 0, "full": true}}],    # index into the buffers
 "requests": [{"rank", "number", "id", "client", "state", "num_prompt_tokens", "num_cached_tokens", "num_computed_tokens",
               "num_output_tokens", "max_total_tokens", "num_preemptions", "added_at", "first_token_at", "ended_at",
               "finish_reason", "own", "foreground", "preview"}],     # all that the table has: at most 200
 "waves": {"reset": true, "spans": [{"start", "end", "rank", "running", "steps", "dummy_steps", "wave", "num_requests"}]}}
```
STEP is `[step, time, seconds, num_running, num_waiting, num_free_blocks, num_cached_blocks, entries, preempted, finished]`:
`seconds` is null until its outcome is known; `entries` is null if the same requests as in the step before computed a token
each and nothing else was done, else flat: `[number, tokens, kind, cached, ...]`, kind 0 a decode, 1 a part of a prompt, 2 a
part of what was lost in a preemption, `cached` its prefix hit in tokens if it was admitted in this step, else -1.
`preempted` and `finished` are lists of numbers, or null. A step is sent again when its `seconds` are known, or when another
request has ended since, as `[step, null, seconds, finished]`, `finished` being the whole list or null. A long history comes in
several frames, the oldest steps first. Two steps of a rank in a row may have the same number only when `history_lost` lies
between them. Texts (ids, names, previews) are cut to at most 200 characters.

Wave spans come when they are settled, about a second late: what is sent is not changed any more. Those of a frame are new
ones; with `reset` all earlier ones are void.

A buffer of blocks is little-endian uint32: full, one word a block; else pairs (block, word). A word has the reference count in
bits 0 to 11 (4095: that or more), bit 12 if the block is cached, and in bits 13 to 31 the number of the request that took it last,
modulo 2**19 - 1, or 2**19 - 1 if none did.

From the script to the kernel: `{"kind": "hello"}`, `{"kind": "alive"}` every five seconds while it is visible,
`{"kind": "abort", "rank": 0, "number": 12}` (answer: `{"kind": "aborted", "rank", "number", "error": null}`),
`{"kind": "block", "rank": 0, "block": 17}` (answer: `{"kind": "block", "rank", "block", "lines": [str, ...]}`), and
`{"kind": "export"}` (answer: `{"kind": "export", "name": "trace.json", "text": str}`). Synchronised traits beside the
messages: `snapshot` (a dict: a reset frame with one key more, `"buffers"`, a list of its buffers in base64; renewed now and then,
so that a saved notebook has something to show; empty if there is none), `interrupt_path` (`api/kernels/<id>`, empty if unknown)
and `height` (pixels; 0: as high as its content; the script sets it when the handle is dragged).

All times are seconds of `time.time()`; a rank's spans come in order and do not overlap. While a widget is
visible a frame comes at least every five seconds, as an answer to `alive`, even if nothing has changed: the script says that the
kernel does not answer when none has come for fifteen.
"""
