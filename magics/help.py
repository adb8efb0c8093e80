"""The text that `%engine help` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nbengine.magics.arguments import MagicParser

Magic = TypeVar("Magic", bound=Callable[..., Any])

ENGINE_HELP = """\
%engine keeps a language model running in a process beside this notebook.

  %engine start [MODEL] [flags]   start one: smollm2-135m (default), random-tiny, a directory,
                                  a .gguf file or a hub id            %engine start -h lists the flags
  %engine status [NAME]           requests, KV blocks, prefix cache, engine cores, workers
  %engine tree [NAME]             its processes and their connections
  %engine history [--last 1h]     what it did, watched or not: tokens a second, latencies, requests, cache
  %engine watch "ttft_p95 > 0.5"  say when a figure passes a bound; --notify, --list, --stop [N]
  %engine logs [NAME] [-n N] [-f] the last lines of its log; -f follows it; --worker R: of one of its workers
  %engine config [NAME]           its whole configuration, and the source of each value
  %engine restart [flags]         stop and start again, with the same arguments and those given here
  %engine load MODEL [flags]      another model in its place, under its name
  %engine fit MODEL [flags]       tell whether a model fits on this machine, before anything is loaded
  %engine models                  the models that are here, what they need, and those worth fetching;
                                  --classes: which models run
  %engine serve [NAME] [--port N] answer the clients of OpenAI's and Anthropic's APIs over HTTP; --stop
  %engine stop [NAME] [--drain]   end it and say how much memory came back

  %engine scale --dp N            have N engine cores, while requests run
  %engine waves [--seconds S]     show each engine core over time: steps, dummy steps, waves

  %engine sleep [--level 2]       give memory back without ending it; %engine wake or the next request
                                  takes it again (--hold: only %engine wake)
  %engine pause / resume          hold all requests back, and go on
  %engine reset                   forget the prefix cache
  %engine profile start / stop    record what it computes, as a Chrome trace

  %engine recover [N] [-l]        show what was written before a page reload or a kernel restart

  %engine ps                      all your engines on this machine
  %engine attach [NAME]           join one: yours from before a kernel restart, or another notebook's
  %engine detach [NAME]           leave it running without this notebook
  %engine reap [--all]            clean up after engines that died; --all: end those without a client

Then ask it something:

  %%generate --max-tokens 100 -o answer
  Explain {topic} to a ten-year-old.

  %%chat                          a conversation, with all that was said before in mind; %chat -h
  %%prompt NAME                   keep a prompt with {variables}; %generate @NAME x=… asks with it; %prompts lists them
  %playground                     edit a prompt and ask it with two settings side by side
  %runs                           all that was asked before, to search, compare and ask again; %runs -h
  %%generate -h                   the flags: sampling, formats, -o NAME, -a for the background, -t RANK
  %config NBEngine                the defaults

Interrupt a cell and its text so far is kept; the engine goes on. Restart the kernel and the engine is still there:
%engine attach, and so is what it had written: %engine recover. An engine that nobody is attached to ends by itself after its --keep-alive (10 minutes).
"""


def documented(help_text: str | Callable[[], MagicParser]) -> Callable[[Magic], Magic]:
    """Make a decorator that adds a magic's `-h` text to its docstring, so that `%magic?` shows it."""

    def document(magic: Magic) -> Magic:
        text = help_text if isinstance(help_text, str) else help_text().format_help()
        magic.__doc__ = f"{magic.__doc__}\n\n{text}"
        return magic

    return document
