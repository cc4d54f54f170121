"""What transformers renders, we render, character for character; what it refuses, we refuse."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs edge-mtp[verify]")

from jinja2.filters import FILTERS
from jinja2.tests import TESTS
from transformers.utils.chat_template_utils import render_jinja_template

from chat_words import GEMMA_LIKE, ChatWords
from edge_runtime.text.chat_template import PLAIN_TEMPLATE, TURNS_TEMPLATE, ChatTemplate
from edge_runtime.text.template_renderer import Renderer, TemplateError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " Be <b>brief</b> & kind. "},
    {"role": "user", "content": "hi\nthere 日本", "extra": [3, 1.5, None, True, {"b": 1, "a": "é"}]},
    {"role": "assistant", "content": "Hello.", "tool_calls": [{"function": {"name": "f", "arguments": {"z": 1, "a": [1, "x"]}}}]},
    {"role": "user", "content": "see https://example.org/a?b=c and go"},
]
VARIABLES: dict[str, Any] = {"tools": [{"function": {"name": "f"}}], "documents": None, "bos_token": "<bos>", "add_generation_prompt": True}
REFUSED = "(refused)"
# They draw at random.
RANDOM = {"random"}


def ours(source: str, messages: list[dict[str, Any]] = MESSAGES, **variables: Any) -> str:
    try:
        return Renderer(source).render({"messages": messages, **VARIABLES, **variables})
    except TemplateError:
        return REFUSED


def theirs(source: str, messages: list[dict[str, Any]] = MESSAGES, **variables: Any) -> str:
    try:
        return render_jinja_template([messages], chat_template=source, **VARIABLES, **variables)[0][0]
    except Exception:  # noqa: BLE001 - a template may raise anything
        return REFUSED


def without_addresses(text: str) -> str:
    return re.sub("0x[0-9a-f]+", "0x", text)


CONSTRUCTS = [
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n{% endgeneration %}{% endif %}\n{% endfor %}",
    "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}",
    "{%- generation -%}  a  {%- endgeneration -%}  b",
    "{% for m in messages %}{% generation %}{% generation %}{{ loop.index }}{% endgeneration %}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "{% generation %}",
    "{% set ns = namespace(text='') %}{% generation %}{% set ns.text = 'kept' %}{% endgeneration %}{{ ns.text }}",
    "{% macro m(x) %}{% generation %}{{ x }}{{ caller() }}{% endgeneration %}{% endmacro %}{% call m(2) %}c{% endcall %}",
    "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i == 3 %}{% break %}{% endif %}{% endfor %}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages[1] | tojson(ensure_ascii=True, sort_keys=True) }}",
    "{{ messages[1].extra | tojson(separators=(',', ':')) }}{{ {'a': '<b>'} | tojson }}",
    "{{ namespace(self=1).self }}{{ namespace({'a': 1}, b=2).b }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ namespace(_x=1) }}",
    "{{ dict(a=1, **{'b': 2}) }}{{ dict([('a', 1)]) }}{{ dict.fromkeys(['a', 'b'], 1) }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y-%m-%d') }}",
    "{{ range(3) | list }}{{ range(0, 9, 4) | list }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{% set j = joiner('|') %}{{ j() }}x{{ j() }}y",
    "{{ '%s-%d' | format('a', 3) }}{{ '{}:{x}'.format(1, x=2) }}{{ '%s' % 'a' }}{{ 'ab' * 3 }}{{ [1] * 2 }}{{ 7 // 2 }}{{ 2 ** 70 }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ 'a'.upper }}",
    "{{ 'abc'.center(9, '*') }}{{ 'a'.zfill(4) }}{{ 'a\tb'.expandtabs(4) }}{{ 'ab'.encode() }}{{ 'A'.casefold() }}{{ 'a' is string }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].pop('role') }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x ~ x }}{% filter upper %}x{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}",
    "{% block body %}{{ messages | length }}{% endblock %}{{ self.body() }}",
    "{% autoescape true %}{{ '<b>' }}{% endautoescape %}",
    "{% raw %}{{ x }}{% endraw %}{# comment #}  x",
    "# for m in messages\n{{ m.role }}\n# endfor",
    "  {% if true %}\n    a\n  {% endif %}\n\n{%- if true %} b {% endif -%}\n",
    "{{ undefined_name }}{{ messages[99] }}{{ messages[0].nothing }}{{ messages[0].nothing is defined }}",
    "{{ messages[0].nothing.more }}",
    "{{ messages | no_such_filter }}",
    "{% if false %}{{ messages | no_such_filter }}{% endif %}a",
    "{{ 1 is no_such_test }}",
    "{% unknown %}",
    "{% include 'x' %}",
    "{% trans %}a{% endtrans %}",
    "{% do messages %}",
    "{{ documents is none }}{{ tools is iterable }}{{ add_generation_prompt }}{{ eos_token is defined }}",
    "{{ [1, 2, 3][::-1] }}{{ 'abc'[-2:] }}{{ (1, 2) }}{{ {1: 2} }}{{ 1 if false }}{{ 1e999 }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | map('length') | list }}",
    "{{ messages | groupby('role') | map('length') | list }}",
    "{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | list }}{{ messages | rejectattr('extra') | list }}",
    "{% for k, v in messages[2].items() %}{{ k }}{{ loop.last }}{{ loop.previtem }}{% else %}none{% endfor %}",
    "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{{ loop.depth }}{% endfor %}",
]


@pytest.mark.parametrize("source", CONSTRUCTS)
def test_constructs_render_as_in_transformers(source: str) -> None:
    assert without_addresses(ours(source)) == without_addresses(theirs(source))


def compared(sources: list[str]) -> int:
    """Compares templates; returns how many are rendered. Those are joined, as each costs a process; what is refused is compared alone."""
    rendered = [source for source in sources if theirs(source) != REFUSED]
    joined = "\n".join(rendered)
    assert without_addresses(ours(joined)) == without_addresses(theirs(joined))
    assert {ours(source) for source in sources if source not in rendered} <= {REFUSED}
    return len(rendered)


VALUES = [
    "messages",
    "messages[1]",
    "'see https://example.org/a and <b>more</b> words, 7 of them'",
    "['b', 'a', 'B', 'b']",
    "-3.14159",
    "none",
    "nothing",
    "[[1, 2], [3, 4]]",
]
ARGUMENTS = ["", "(2)", "(attribute='role')", "('e', 2)"]


@pytest.mark.parametrize("name", sorted(set(FILTERS) - RANDOM))
def test_filters_render_as_in_transformers(name: str) -> None:
    """Each filter of jinja2 on each kind of value; lazy results are made lists."""
    call = [f"{value} | {name}{arguments}" for value in VALUES for arguments in ARGUMENTS]
    sources = [f"{{{{ {each} }}}}{{% set x = {each} %}}{{{{ x | list if x is iterable and x is not string else x }}}}" for each in call]
    compared(sources)


def test_tests_give_what_they_give_in_transformers() -> None:
    symbols = [name for name in TESTS if name.isidentifier()]
    sources = [f"{{{{ {value} is {name}{arguments} }}}}" for value in VALUES[2:7] for name in symbols for arguments in ("", "(2)")]
    assert compared(sources) > 100


@pytest.mark.parametrize("source", [GEMMA_LIKE, TURNS_TEMPLATE, PLAIN_TEMPLATE])
@pytest.mark.parametrize("thoughts", [{}, {"reasoning_content": "x"}, {"thinking": "y"}, {"reasoning": "z", "thinking": None}])
def test_conversations_are_given_to_a_template_as_by_transformers(source: str, thoughts: dict[str, Any]) -> None:
    messages = [*MESSAGES[:2], {**MESSAGES[2], **thoughts}, MESSAGES[3]]
    shown = (
        source + "{{ messages[2] | tojson(sort_keys=True) }}{{ documents }}{{ pad_token }}{{ unk_token }}{{ mask_token }}{{ bos_token }}"
    )
    given = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    expected = render_jinja_template([messages], chat_template=shown, add_generation_prompt=True, enable_thinking=False, **given)[0][0]
    assert ChatTemplate(shown, ChatWords()).render(messages) == expected


def test_numbers_and_texts_reach_the_template_unchanged() -> None:
    value = {"n": [0, -1, 2**60, 1e-300, 1e300, float("inf")], "t": "\ud800 \u2028 \x00 \U0001f600", "e": {}}
    assert json.loads(ours("{{ x | tojson }}", x=value)) == value
    assert ours("{{ x }}", x=value) == theirs("{{ x }}", x=value)
