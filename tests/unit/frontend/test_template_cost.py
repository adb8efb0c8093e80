"""The caller's own process renders only the templates whose text shows that they take little."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from nbengine.frontend.text import template_process
from nbengine.frontend.text.template_cost import is_cheap
from nbengine.frontend.text.template_process import TemplateCall, render_template
from nbengine.models.checkpoints.tiny import _CHAT_TEMPLATE as TINY
from tests.unit.frontend.test_chat_templates import ANSWERED, CHATML, MISTRAL, QUESTION, WEATHER

ZEPHYR = """
{% for message in messages %}
{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{% endfor %}"""
LLAMA_2 = """
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% endfor %}"""
THINKING = """
{%- for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
{%- if message.role == 'user' and not ns.found %}{% set ns.found = true %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
{{- '<|' + message.role + '|>' + content }}
{%- endfor %}"""
PLAIN = {
    "tiny": TINY,
    "chatml": CHATML,
    "zephyr": ZEPHYR,
    "llama 2": LLAMA_2,
    "thinking": THINKING,
    "mistral": MISTRAL,
}

NOT_PLAIN = {
    "a range": "{% for i in range(10**12) %}{% endfor %}",
    "a product": "{{ 'x' * 10**10 }}",
    "a filter that widens": "{{ 'x'|center(10**10) }}",
    "a method that widens": "{{ 'x'.ljust(10**10) }}",
    "formatting": "{{ '%1000000000000d' % 1 }}",
    "formatting of a message": "{{ messages[0].content % 1 }}",
    "a method that formats": "{{ messages[0].content.format(1) }}",
    "replacements": "{{ messages[0].content.replace('', messages[0].content) }}",
    "a join": "{{ messages[0].content|join(messages[0].content) }}",
    "a filter by its name": "{{ messages|map('center', 10**10)|list }}",
    "a namespace that doubles": (
        "{% set ns = namespace(s='ab') %}{% for m in messages %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    ),
    "two namespaces that add up": (
        "{% set a = namespace(s='a') %}{% set b = namespace(s='b') %}"
        "{% for m in messages %}{% set a.s = a.s ~ b.s %}{% set b.s = b.s ~ a.s %}{% endfor %}"
    ),
    "lists in lists": (
        "{% set ns = namespace(l='') %}{% for m in messages %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}"
    ),
    "an alias": (
        "{% set ns = namespace(s='ab') %}{% for m in messages %}{% set t = ns.s %}{% set ns.s = t + t %}{% endfor %}"
    ),
    "a namespace that grows": (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s ~ m.content %}{{ ns.s }}{% endfor %}"
    ),
    "a line that doubles": "{% set s = messages[0].content %}" + "{% set s = s ~ s %}" * 40,
    "JSON of JSON": (
        "{% set ns = namespace(s='\\\\') %}{% for m in messages %}{% set ns.s = ns.s|tojson %}{% endfor %}"
    ),
    "what a namespace is made with": (
        "{% set ns = namespace(s='ab') %}{% for m in messages %}{% set ns = namespace(s=ns.s ~ ns.s) %}{% endfor %}"
    ),
    "a block that is assigned": "{% set s %}{{ messages }}{{ messages }}{% endset %}" * 2,
    "macros": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(80) }}",
    "a recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a loop over a text": "{% for c in messages[0].content %}{{ messages }}{% endfor %}",
    "a loop over a text by another name": "{% set m = messages[0].content %}{% for c in m %}{{ c }}{% endfor %}",
    "lipsum": "{{ lipsum(n=10**7) }}",
    "deep JSON": "{% for m in messages %}{{ messages|tojson(indent=10**6) }}{% endfor %}",
    "arguments from a list": "{{ messages[0].content.split(*messages) }}",
}
DATA = {"messages": ANSWERED, "tools": [WEATHER]}


@pytest.mark.parametrize("name", PLAIN)
def test_the_usual_templates_are_rendered_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_cheap(PLAIN[name], DATA, {"eos_token": "</s>"})

    def refuse(call: TemplateCall) -> str:
        raise AssertionError("the process is not needed")

    monkeypatch.setattr(template_process._process, "render", refuse)
    call = TemplateCall(PLAIN[name], [*QUESTION], None, {"bos_token": "<s>", "eos_token": "</s>"})
    assert "Is it raining in Bern?" in render_template(call)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_could_take_long_or_grow_is_not_rendered_here(name: str) -> None:
    tracemalloc.start()
    start = time.thread_time()
    assert not is_cheap(NOT_PLAIN[name], DATA, {})
    assert time.thread_time() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_a_plain_template_of_much_data_is_not_rendered_here() -> None:
    messages = [{"role": "user", "content": "x" * 1000}] * 400
    assert is_cheap(ZEPHYR, {"messages": messages[:20], "tools": None}, {})
    assert not is_cheap(ZEPHYR, {"messages": messages, "tools": None}, {})
    calls = [{"role": "user", "content": "", "tool_calls": "x" * 10**6}]
    assert not is_cheap(CHATML, {"messages": calls, "tools": None}, {})
    assert not is_cheap(ZEPHYR, {"messages": messages[:1], "tools": None}, {"eos_token": "x" * 10**6})
