"""What a chat says and a template does not show is refused, with the field and the number of the message."""

from __future__ import annotations

import jinja2
import pytest

from moe_rl.tasks.shown_messages import NotShown, check_shown, shown_whole

# Shows all that it is told, but the ids of calls.
WHOLE = """{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}
{% for m in messages %}<{{ m.role }} {{ m.name }}>{{ m.reasoning_content }}{{ m.content }}{% for c in m.tool_calls %}
{{ c.function.name }}: {{ c.function.arguments }}{% endfor %}
{% endfor %}"""
# Knows no tool, and shows a call only where there is no text, as a published template does.
SILENT = """{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name }}
{{ c.function.arguments }}{% endfor %}{% else %}{{ m.role }}: {{ m.content }}{% endif %}{% endfor %}"""
# Shows reasoning behind the last question only, as those of Qwen3 do.
LATEST = WHOLE.replace("{{ m.reasoning_content }}", "{% if loop.index0 > last %}{{ m.reasoning_content }}{% endif %}")
ADD = {"name": "add", "description": "Adds.", "parameters": {"properties": {"a": {}}}}
TOOLS = [{"type": "function", "function": ADD}]
# Shows the names of a tool's arguments alone.
NAMES = WHOLE.replace("{{ tool.function | tojson }}", "{% set f = tool.function %}{{ f.name }} {{ f.description }}"
                      "{{ f.parameters.properties | list }}")  # fmt: skip
DESCRIBED = {"function": {**ADD, "parameters": {"properties": {"a": {"description": "A number.", "enum": [5]}}}}}
ASKS, SAYS = {"role": "user", "content": "5"}, {"role": "assistant", "content": "5"}


def call(number, arguments='{"a": 5}'):
    return {"id": f"call{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


def result(number, **more):
    return {"role": "tool", "tool_call_id": f"call{number}", "content": "5", **more}


def calls(*made, content=None, **more):
    return {"role": "assistant", "content": content, "tool_calls": list(made), **more}


def writes(template):
    made = jinja2.Environment().from_string(template)

    def render(messages, tools):
        last = max((n for n, one in enumerate(messages) if one["role"] == "user"), default=-1)
        return made.render(messages=messages, tools=tools, last=last)

    return render


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([ASKS, SAYS, ASKS], [*TOOLS, DESCRIBED]),
        ([ASKS, calls(call(1)), result(1)], []),
        ([ASKS, calls(call(1, {"a": [5]}), call(2), content="5"), result(1), result(2)], TOOLS),
        ([ASKS, calls(call(1), reasoning_content="5"), result(1, name="add")], []),
        ([{"role": "user", "content": [{"type": "text", "text": "5"}], "name": "5"}], []),
        ([ASKS, {"role": "assistant", "content": " "}, {**ASKS, "name": None, "tool_calls": []}], []),
    ],
)
def test_what_is_shown_is_accepted(messages, tools):
    check_shown(messages, tools, writes(WHOLE))


@pytest.mark.parametrize(
    ("template", "messages", "tools", "number", "field"),
    [
        (SILENT, [ASKS], TOOLS, None, "tools.0"),
        (SILENT, [ASKS, calls(call(1), content=""), result(1)], [], 1, "tool_calls"),
        (SILENT, [ASKS, calls(call(1), content="5"), result(1)], [], 1, "tool_calls"),
        (SILENT, [ASKS, calls(call(1), reasoning_content="5")], [], 1, "reasoning_content"),
        (SILENT, [ASKS, {**SAYS, "reasoning_content": "5"}, ASKS], [], 1, "reasoning_content"),
        (SILENT, [ASKS, {**SAYS, "thinking": "5"}], [], 1, "thinking"),
        (SILENT, [{**ASKS, "name": "5"}], [], 0, "name"),
        (SILENT, [ASKS, calls(call(1)), result(1, is_error=True)], [], 2, "is_error"),
        (WHOLE.replace("m.content", "m.content[:5]"), [ASKS], [], 0, "content"),
        (WHOLE.replace("c.function.arguments", "5"), [ASKS, calls(call(1))], [], 1, "tool_calls"),
        (WHOLE.replace("in m.tool_calls", "in m.tool_calls[:1]"), [calls(call(1), call(2))], [], 0, "tool_calls"),
        (WHOLE.replace("tool.function |", "tool.function.name |"), [ASKS], TOOLS, None, "tools.0"),
        (NAMES, [ASKS], [{**DESCRIBED, "type": "function"}], None, "tools.0"),
        (WHOLE.replace("{{ m.name }}", ""), [ASKS, calls(call(1)), result(1, name="sub")], [], 2, "name"),
        (WHOLE, [ASKS, calls(call(1), call(2)), result(2), result(1)], [], 2, "tool_call_id"),
        (WHOLE, [ASKS, calls(call(1), call(2)), result(2)], [], 2, "tool_call_id"),
        (LATEST, [ASKS, {**SAYS, "reasoning": "5"}, ASKS], [], 1, "reasoning"),
    ],
)
def test_what_is_not_shown_is_refused_by_its_name(template, messages, tools, number, field):
    """All texts are 5, which every rendering has somewhere."""
    with pytest.raises(NotShown) as caught:
        check_shown(messages, tools, writes(template))
    assert (caught.value.number, caught.value.field) == (number, field)
    assert number is None or f"message {number}" in str(caught.value)


def test_a_template_that_shows_ids_may_get_results_in_any_order():
    shows = WHOLE.replace("{{ c.function.name }}", "{{ c.id }}{{ c.function.name }}")
    shows = shows.replace("{{ m.content }}", "{{ m.tool_call_id }}{{ m.content }}")
    check_shown([ASKS, calls(call(1), call(2)), result(2), result(1)], [], writes(shows))


def test_reasoning_before_the_last_question_may_go():
    earlier = [ASKS, {**SAYS, "reasoning_content": "5"}, ASKS]
    check_shown(earlier, [], writes(LATEST))
    now = [*earlier, calls(call(1), reasoning_content="5"), result(1)]
    check_shown(now, [], writes(LATEST))
    with pytest.raises(NotShown, match="reasoning_content of message 3"):
        check_shown(now, [], writes(LATEST.replace("loop.index0 > last", "loop.last")))
    # What the model itself has said is the template's affair: a session counts it.
    check_shown(now, [], writes(SILENT.replace("m.content is none", "m.tool_calls")), said=4)


def test_only_new_messages_are_looked_for():
    history = [ASKS, calls(call(1), call(2)), result(1), result(2)]
    seen = []
    check_shown(history, [], lambda messages, tools: seen.extend(messages) or writes(WHOLE)(messages, tools), start=2)
    assert [one["role"] for one in seen] == ["tool", "tool"]
    with pytest.raises(NotShown, match="message 2"):
        check_shown([*history[:2], result(2), result(1)], [], writes(WHOLE), start=2)


CALLED = (
    "{% for m in messages %}CONTENT{% for c in m.tool_calls %}{{ c.function.name }} ARGUMENTS{% endfor %}{% endfor %}"
)
# Templates that need a text beside a call, arguments as an object or as a text, and no text beside a call.
NEEDING = {
    "text": ("{{ m.content.strip() }}", "{{ c.function.arguments | string }}"),
    "object": ("{{ m.content or '' }}", "{% for k, v in c.function.arguments.items() %}{{ k }} {{ v }}{% endfor %}"),
    "JSON text": ("{{ m.content or '' }}", "{{ ' ' + c.function.arguments }}"),
    "nothing": ("{% if m.content is none or not m.tool_calls %}{{ m.content or '' }}", "{{ c.function.arguments }}"),
}


def needs(what):
    content, arguments = NEEDING[what]
    end = "{% endif %}" if what == "nothing" else ""
    render = writes(
        CALLED.replace("CONTENT", content).replace("ARGUMENTS{% endfor %}", f"{arguments}{{% endfor %}}{end}")
    )

    def strictly(messages, tools):
        try:
            return render(messages, tools)
        except (jinja2.UndefinedError, TypeError) as error:
            raise ValueError(str(error)) from error

    return strictly


@pytest.mark.parametrize("arguments", [{"a": 7}, '{"a": 7}'])
@pytest.mark.parametrize("beside", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("needed", NEEDING)
def test_a_call_is_shown_however_it_is_spelt(needed, beside, arguments):
    answer = {"role": "assistant", "tool_calls": [call(1, arguments)], **beside}
    _, text = shown_whole([ASKS, answer, result(1)], [], needs(needed))
    same = {"object": "a 7", "JSON text": ' {"a": 7}'}.get(needed, str(arguments))
    assert text == f"5add {same}5"


def test_a_call_without_its_wrapper_is_shown():
    answer = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 7}}]}
    assert shown_whole([ASKS, answer], [], needs("text"))[1] == "5add {'a': 7}"


@pytest.mark.parametrize("made", [["add"], [{"name": 5}], [{"function": "add"}], [call(1, "no JSON")], [call(1, [1])]])
def test_a_call_that_is_none_is_refused_in_every_spelling(made):
    with pytest.raises(ValueError):
        shown_whole([ASKS, calls(*made)], [], needs("object"))
