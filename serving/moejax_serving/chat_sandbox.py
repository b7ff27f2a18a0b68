"""The sandbox that chat templates run in, with what Hugging Face's transformers offers them.

A rendering may go round its loops MAX_ROUNDS times: a thread that runs a template cannot be ended.

That is: `raise_exception`, `strftime_now`, a `tojson` filter that leaves characters as they are,
`break` and `continue`, and a `generation` tag. `dict` and `namespace` are narrower than Jinja's, so
that no template can change its input or store names like `__class__`.
"""

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

MAX_ROUNDS = 1_000_000
_COUNTED = "moejax_counted"
_ROUNDS = "rounds of loops"  # no name that a template could set


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """The template, which threads may share.

    Raises:
        jinja2.TemplateSyntaxError, SyntaxError: it is no template.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    environment.filters[_COUNTED] = _counted
    tree = environment.parse(source)
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(
            loop.iter, _COUNTED, [], [], None, None, lineno=loop.lineno, environment=environment
        )
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, items: Any) -> Iterator[Any]:
    """What a loop goes over, counted with that of all loops of the rendering."""
    rounds = context.vars.setdefault(_ROUNDS, [0])
    for item in items:
        rounds[0] += 1
        if rounds[0] > MAX_ROUNDS:
            raise jinja2.TemplateError(f"it goes round its loops more than {MAX_ROUNDS} times")
        yield item


def to_plain(value: Any) -> Any:
    """A copy in JSON's types and tuples, which have no methods that could do harm in a template.

    Raises:
        TypeError: there is something else in it.
        RecursionError: it is nested too deep.
    """
    if value is None or isinstance(value, bool):
        return value
    # Subclasses, such as enums, may have methods of their own.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(to_plain(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic, as OpenAI's client has it
        return to_plain(dump())
    raise TypeError(f"a template can read JSON's types only, got a {type(value).__name__}")


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks an assistant's text; it changes nothing here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_return_text")
        # A block of its own, as in transformers: no loop around it can be left from inside.
        return jinja2.nodes.CallBlock(call, [], [], body, lineno=line)

    def _return_text(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` for templates: the type itself has methods that change a dictionary."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` for templates, without names that Python itself uses."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {name!r}: names may not begin with an underscore"
        )


def _to_json(
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: Any) -> str:
    return datetime.datetime.now().strftime(format)
