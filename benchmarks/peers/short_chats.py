"""Short chats over HTTP, by several clients at once, each on one connection and one chat after another."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

QUESTIONS = (
    "What is the capital of {}?",
    "Name an animal that lives in {}.",
    "Which river flows through {}?",
    "What do people eat in {}?",
)
PLACES = [
    "Austria",
    "Brazil",
    "Chile",
    "Denmark",
    "Egypt",
    "France",
    "Ghana",
    "Hungary",
    "Iceland",
    "Japan",
    "Kenya",
    "Laos",
    "Mexico",
    "Nepal",
]


@dataclass(frozen=True, slots=True)
class Chats:
    """The findings of a run: seconds, and the tokens of all answers."""

    seconds: float
    tokens: int


def question(number: int) -> str:
    """Return the question of that number; numbers far apart have different ones."""
    place = PLACES[number % len(PLACES)]
    return f"({number}) {QUESTIONS[number // len(PLACES) % len(QUESTIONS)].format(place)}"


async def run(url: str, model: str, clients: int, chats: int, max_tokens: int, first: int) -> Chats:
    """Have `clients` ask `chats` questions together, from number `first` on; return the time until the last answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    numbers = iter(range(first, first + chats))
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        reader, writer = await asyncio.open_connection(host, int(port))
        for number in numbers:
            body = _body(model, question(number), max_tokens)
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = json.loads(await _read(reader))
            tokens += answer["usage"]["completion_tokens"]
        writer.close()

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Chats(time.perf_counter() - begin, tokens)


def _body(model: str, text: str, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    fields = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return json.dumps(fields).encode()


async def _read(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower().decode()
    lines = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
    body = await reader.readexactly(int(lines["content-length"]))
    if " 200 " not in head.splitlines()[0]:
        raise SystemExit(f"a chat was answered with {body.decode()[:300]}")
    return body
