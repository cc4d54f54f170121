"""Templates come with files from outside: hostile ones end in one sentence, soon, and with little memory, and reach nothing of Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chat_words import ChatWords
from edge_devices import fork_host
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.text.chat_template import ChatTemplate
from edge_runtime.text.template_renderer import Renderer, TemplateError

MESSAGES = [{"role": "user", "content": "hi"}]
SECONDS = 0.3
needs_fork = pytest.mark.skipif(not fork_host.AVAILABLE, reason="needs fork")


def render(source: str, messages: list = MESSAGES) -> str:
    return ChatTemplate(source, ChatWords()).render(messages)


def grown(step: str, start: str = "'aa'") -> str:
    """A template that replaces x by this expression 99 times."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(99) %}}{{% set ns.x = {step} %}}{{% endfor %}}{{{{ ns.x }}}}"


LONG = "{% set x = range(99999) | map('string') | list %}"
GREEDY = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "doubled text": grown("ns.x ~ ns.x"),
    "added text": grown("ns.x + ns.x"),
    "multiplied text": "{{ 'a' * 10 ** 10 }}",
    "multiplied list": "{{ [1] * 10 ** 10 }}",
    "huge number": grown("ns.x * ns.x", "10"),
    "power": "{{ 9 ** (9 ** 9) }}",
    "nested lists": grown("[ns.x, ns.x]"),
    "nested mappings": grown("{'l': ns.x, 'r': ns.x}") + "{{ ns.x | tojson }}",
    "nested tuples": grown("(ns.x, ns.x)"),
    "dict()": grown("dict(l=ns.x, r=ns.x)"),
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "generation blocks": grown("ns.x + ns.x").replace("{% set ns.x", "{% generation %}{{ ns.x }}{% endgeneration %}{% set ns.x"),
    "own text": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "text of a block": "{% set t %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}{{ t ~ t }}",
    "replace": grown("ns.x | replace('a', 'aa')"),
    "replace method": grown("ns.x.replace('a', 'aaaa')"),
    "join": grown("[ns.x, ns.x] | join(ns.x)"),
    "padding": "{{ 'a'.ljust(10 ** 9) }}",
    "centre": "{{ 'a' | center(10 ** 9) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "indent": "{{ 'a\nb' | indent(10 ** 9) }}",
    "json indent": "{{ [1] | tojson(indent=10 ** 9) }}",
    "words": "{{ lipsum(n=10 ** 6) }}",
    "lazy filter": "{{ range(99999) | select('in', range(99999) | map('string') | list) | list }}",
    "membership": LONG + "{% for i in range(99999) %}{% if (i ~ 'x') in x %}{% endif %}{% endfor %}",
    "comparison": LONG + "{% set y = x | list %}{% for i in range(99999) %}{% if x == y %}{% endif %}{% endfor %}",
    "deep parsing": "{{ " + "-".join(["(1"] * 90) + ")" * 90 + " }}" + "{% if 1 %}" * 90 + "{% endif %}" * 90 + "{{ 1 }}" * 100_000,
}


@needs_fork
@pytest.mark.parametrize("source", GREEDY.values(), ids=GREEDY)
def test_greedy_templates_end_in_one_sentence(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        Renderer(source, seconds=SECONDS).render({"messages": MESSAGES})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_text_that_is_too_long_is_refused() -> None:
    longest = "{{ 'a' * 1000000 }}" * 4
    assert len(render(longest)) == 4_000_000
    with pytest.raises(RequestError, match="more than 4000000 characters"):
        render(longest + "b")


ESCAPES = {
    "attribute of a type": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "attr filter": "{{ '' | attr('__class__') | attr('__mro__') }}",
    "mapped attribute": "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list }}",
    "mapped filter": "{{ [''] | map('attr', '__class__') | map('attr', '__mro__') | list }}",
    "subscript": "{{ ''['__class__']['__mro__'] }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format of a mapping": "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
    "format by another name": "{% set f = '{0.__class__.__mro__}'.format %}{{ f('') }}",
    "format through attr": "{{ ('{0.__class__.__mro__}' | attr('format'))('') }}",
    "globals of a function": "{{ raise_exception.__globals__['json'] }}",
    "globals of a filter": "{{ lipsum.__globals__['os'].getcwd() }}",
    "constructor of a class": "{{ cycler.__init__.__globals__ }}",
    "constructor of a helper": "{{ joiner.__init__.__globals__ }}",
    "type of the dictionary": "{{ dict.__class__.__mro__ }}",
    "namespace of dunders": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "namespace made of dunders": "{{ namespace(**{'__class__': 1}) }}",
    "the template itself": "{{ self._TemplateReference__context.environment }}",
    "frame of a generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "code of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "code of a block's caller": "{% macro m() %}{{ caller._func.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "loop": "{% for i in [1] %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
    "changed messages": "{{ messages.append(1) }}",
    "changed message": "{{ messages[0].update({'content': 'x'}) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}",
    "a parent": "{% extends '/etc/passwd' %}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_template_reaches_nothing_of_python(source: str) -> None:
    """Refused, or undefined, which is written as nothing."""
    try:
        text = render(source)
    except (RequestError, BundleError):
        return
    assert text.strip() in ("", "[]", "[Undefined]"), text


# In a process of its own, whose children are those of this template alone.
MEASURED = """
import contextlib, json, resource, sys
from test_template_sandbox import GREEDY
from edge_runtime.text.template_renderer import Renderer, TemplateError
assert Renderer("{{ x }}").render({"x": "hi"}) == "hi"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with contextlib.suppress(TemplateError):
    Renderer(GREEDY[sys.argv[1]], seconds=1.0).render({})
print(json.dumps(["jinja2" in sys.modules, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("name", ["doubled text", "nested lists", "comparison", "deep parsing"])
def test_this_process_neither_runs_it_nor_spends_memory_on_it(name: str) -> None:
    psutil = pytest.importorskip("psutil", reason="needs edge-mtp[fleet]")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))}
    with subprocess.Popen([sys.executable, "-c", MEASURED, name], env=environment, stdout=subprocess.PIPE, text=True) as started:
        peak = 0
        while started.poll() is None:
            try:
                children = psutil.Process(started.pid).children(recursive=True)
                peak = max(peak, *(child.memory_info().rss for child in children), 0)
            except (psutil.NoSuchProcess, TypeError):
                pass
            time.sleep(0.03)  # the look itself takes a third of that
        runs, kilobytes = json.loads(started.stdout.read())
    assert not runs
    assert kilobytes < 32 << 10
    assert 10 << 20 < peak < 600 << 20


@needs_fork
def test_a_template_is_used_again_after_a_limit() -> None:
    renderer = Renderer("{% if y %}{{ y ** (y ** y) }}{% endif %}{{ x * z }}", seconds=SECONDS)
    plain = {"x": "hi", "y": 0, "z": 1}
    for more, reason in (({"y": 9}, f"{SECONDS:g} s of processor time or 256 MB"), ({"z": 10**10}, "more than 256 MB")) * 2:
        with pytest.raises(TemplateError, match=reason):
            renderer.render(plain | more)
        assert renderer.render(plain) == "hi"


@pytest.mark.parametrize(
    "source", ["{{", "{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% unknown %}", "{{ x | no_such_filter }}"]
)
def test_broken_templates_are_the_bundles_fault(source: str) -> None:
    with pytest.raises(BundleError, match="does not compile"):
        ChatTemplate(source, ChatWords())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[7].content.text }}", "no element 7"),
        ("{{ [messages, 1] | sort }}", "not supported between"),
    ],
)
def test_why_a_template_refuses_reaches_the_user(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        render(source)
