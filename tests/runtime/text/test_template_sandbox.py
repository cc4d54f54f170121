"""Templates come with files from outside: hostile ones end in one sentence, soon, and with little memory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest

from chat_words import ChatWords
from edge_devices.children import forked
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list = MESSAGES, **options) -> str:
    return ChatTemplate(source, ChatWords()).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' ~ 1 ~ 'b' }}", "a1b"),
        ("{% for m in messages %}\n  {{ m.role }}{{ loop.last }}\n{% endfor %}", "  userTrue\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 2 %}{{ ns.x }}", "3"),
        ("{{ {'b': 1, 'a': [1, 'é']} | tojson }}", '{"b": 1, "a": [1, "é"]}'),
        ("{{ 'é' | tojson(ensure_ascii=True) }}{{ [1] | tojson(indent=2) }}", '"\\u00e9"[\n  1\n]'),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(messages[0].content) }}", "hihi"),
        ("{{ ['a', 'b'] | join(', ') }}{{ '+'.join(['a', 'b']) }}", "a, ba+b"),
        ("{{ 'a.b'.split('.')[1] }}{{ 'aa'.replace('a', 'b', 1) }}{{ 'xyz'[::-1] }}", "bbazyx"),
        ("{{ 'a\nb' | indent(2) }}{{ 'A ' | trim | lower }}", "a\n  ba"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{{ messages | map(attribute='role') | list | length }}{{ messages | selectattr('role', 'equalto', 'tool') | list }}", "1[]"),
        ("{% if messages is iterable and messages[0] is mapping and x is not defined %}yes{% endif %}", "yes"),
        ("{{ loop is defined }}{{ none }}{{ tools is none }}{{ 7 % 2 }}{{ 3 * 4 }}{{ 2 ** 3 }}", "FalseNoneTrue1128"),
        ("{% set t %}a{{ 1 }}{% endset %}{{ t ~ t }}{% filter upper %}x{% endfilter %}", "a1a1X"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ enable_thinking }}", "<bos><eos>TrueFalse"),
    ],
)
def test_what_templates_use_works_as_in_transformers(source, expected):
    assert render(source) == expected


HOSTILE = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "doubled text": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "added text": "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "multiplied text": "{{ 'a' * 10 ** 10 }}",
    "multiplied list": "{{ [1] * 10 ** 10 }}",
    "huge number": "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "nested lists": "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested mappings": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = {'l': ns.x, 'r': ns.x} %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "nested tuples": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x == 1 }}",
    "dict()": "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = dict(l=ns.x, r=ns.x) %}{% endfor %}{{ ns.x | string }}",
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "own text": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "output of a block": "{% set t %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    "replace": "{{ ('a' | replace('', 'a' * 1)) }}{% set ns = namespace(x='aa') %}"
    "{% for i in range(40) %}{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
    "replace method": "{% set ns = namespace(x='aa') %}{% for i in range(40) %}{% set ns.x = ns.x.replace('a', 'aaaa') %}{% endfor %}",
    "join": "{% set ns = namespace(x='aa') %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}",
    "join method": "{% set ns = namespace(x='aa') %}{% for i in range(40) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "padding": "{{ 'a'.ljust(10 ** 9) }}",
    "centre": "{{ 'a' | center(10 ** 9) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "json indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "time": "{{ strftime_now('%c' * 1) }}{{ strftime_now(('%Y' | replace('', '%c' )) | replace('%', '%%%%%%%%%%%%%%%%%%%%%%%%%%%%')) }}",
    "lazy filter": "{{ range(99999) | select('in', range(99999) | map('string') | list) | list }}",
    "lazy filter in a filter": "{{ [range(99999)] | map('select', 'in', range(99999) | map('string') | list) | map('list') | list }}",
    "attribute of a type": "{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
    "namespace of dunders": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "changed messages": "{{ messages.append(1) }}",
    "changed message": "{{ messages[0].update({'content': 'x'}) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "no such filter": "{{ 'a' | lipsum }}",
    "own refusal": "{{ raise_exception('roles must alternate') }}",
    "type error": "{{ 1 + 'a' }}",
    "division": "{{ 1 / 0 }}",
    "undefined": "{{ messages[7].content.text }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_end_soon_in_one_sentence(source, monkeypatch):
    """The sandbox alone, without the limits of a child process."""
    monkeypatch.setattr(forked, "AVAILABLE", False)
    monkeypatch.setattr("edge_runtime.text.template.filters.MAX_SECONDS", 0.5)
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises((RequestError, BundleError)) as caught:
            render(source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert time.process_time() - begin < 8
    assert peak < 300e6


LONG = "{% set x = range(99999) | map('string') | list %}"
BEHIND_THE_COUNTER = {
    "memory in dictionaries": "{% set ns = namespace(x={}) %}"
    "{% for i in range(90000) %}{% set ns.x = dict(a=ns.x, b=[i] * 1) %}{% endfor %}",
    "memory in split text": "{% set ns = namespace(x=[]) %}{% set t = 'a ' | replace('a', 'b ' * 1) %}{% for i in range(20) %}"
    "{% set t = t | replace(' ', ' a ') %}{% set ns.x = ns.x + [t.split(' ')] %}{% endfor %}{{ ns.x | length }}",
    "membership": LONG + "{% for i in range(99999) %}{% if (i ~ 'x') in x %}{% endif %}{% endfor %}",
    "comparison": LONG + "{% set y = x | list %}{% for i in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
    "slices": LONG + "{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "parsing": "{{ " + "-".join(["(1"] * 90) + ")" * 90 + " }}" + "{% if 1 %}" * 90 + "{% endif %}" * 90 + "{{ 1 }}" * 100_000,
}


# In a process of its own, whose children are those of this template alone.
MEASURED = """
import contextlib, json, resource, sys, time
from test_template_sandbox import BEHIND_THE_COUNTER, render
from edge_devices.children import forked
from edge_runtime.errors import BundleError, RequestError
# One second of processor time in place of five, in the children.
less = "from edge_runtime.text.template import renderer; renderer.STEP_SECONDS = 1.0; "
forked._START = forked._START.replace("main(handler)", less + "main(handler)")
assert render("{{ messages[0].content }}") == "hi"
used, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with contextlib.suppress(RequestError, BundleError):
    render(BEHIND_THE_COUNTER[sys.argv[1]])
seconds, kilobytes = time.process_time() - used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert render("{{ messages[0].content }}") == "hi"
print(json.dumps([seconds, kilobytes]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not forked.AVAILABLE, reason="needs fork")
@pytest.mark.parametrize("name", BEHIND_THE_COUNTER)
def test_what_the_sandbox_cannot_count_ends_with_the_child(name):
    """Ends within the child's limits, written or refused; this process spends neither time nor memory on it."""
    pytest.importorskip("psutil", reason="needs edge-mtp[fleet]")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))}
    with subprocess.Popen([sys.executable, "-c", MEASURED, name], env=environment, stdout=subprocess.PIPE, text=True) as started:
        peak = 0
        while started.poll() is None:
            peak = max(peak, memory_of_children(started.pid))
            time.sleep(0.03)  # the look itself takes a third of that
        seconds, kilobytes = json.loads(started.stdout.read())
    assert seconds < 1
    assert kilobytes < 32 << 10
    assert 10 << 20 < peak < 600 << 20


def memory_of_children(process: int) -> int:
    """The resident bytes of the largest process below this one."""
    import psutil

    largest = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                largest = max(largest, child.memory_info().rss)
    return largest


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.upper }}",
        "{{ messages.index }}",
        "{{ ['a'.upper] }}",
        "{{ {'a': [messages[0].get]} }}",
        "{{ 'x' ~ messages[0].items }}",
        "{{ [raise_exception] | join }}",
        "{{ ['a', 'b'] | map('upper') }}",
        "{{ namespace }}",
        "{{ namespace(x=1) }}",
        "{{ namespace(x='a'.upper) ~ '' }}",
        "{{ 'a'.join([messages.index]) }}",
    ],
)
def test_no_address_is_written(source):
    with pytest.raises(RequestError, match="no text"):
        render(source)


def test_a_template_is_used_again_after_a_limit(monkeypatch):
    template = ChatTemplate("{% if messages[0].content == 'x' %}{{ 9 ** 9 ** 9 }}{% endif %}{{ messages[0].content }}", ChatWords())
    for _ in range(2):
        with pytest.raises(RequestError, match="64 bits"):
            template.render([{"role": "user", "content": "x"}])
        assert template.render(MESSAGES) == "hi"
    for child in template._renderer._idle[:1]:
        child.close()
        with pytest.raises(RequestError, match="processor time or 256 MB"):
            template.render(MESSAGES)
        assert template.render(MESSAGES) == "hi"


@pytest.mark.parametrize("source", ["{{", "{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% unknown %}"])
def test_broken_templates_are_the_bundles_fault(source):
    with pytest.raises(BundleError, match="does not compile"):
        ChatTemplate(source, ChatWords())


def test_the_templates_own_words_reach_the_user():
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
