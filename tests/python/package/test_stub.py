"""_core.pyi against the compiled module: the same names and the same parameters, in both directions."""

from __future__ import annotations

import ast
import re
import types
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fastsync._core as core

STUB = Path(core.__file__).with_name("_core.pyi")


class Parameter(NamedTuple):
    name: str  # "" where the module has no name for it: positional only
    keyword_only: bool
    has_default: bool


class Function(NamedTuple):
    """All signatures of one function, method or property."""

    kind: str
    signatures: tuple[tuple[Parameter, ...], ...] = ()


Members = dict[str, Any]


def public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


# --- what the stub says


def from_arguments(arguments: ast.arguments) -> tuple[Parameter, ...]:
    positional = [*arguments.posonlyargs, *arguments.args]
    optional_from = len(positional) - len(arguments.defaults)
    found = [
        Parameter("" if index < len(arguments.posonlyargs) else argument.arg, False, index >= optional_from)
        for index, argument in enumerate(positional)
    ]
    if arguments.vararg is not None:
        found.append(Parameter("*" + arguments.vararg.arg, False, False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        found.append(Parameter(argument.arg, True, default is not None))
    if arguments.kwarg is not None:
        found.append(Parameter("**" + arguments.kwarg.arg, False, False))
    return tuple(found)


def stub_members(body: list[ast.stmt], in_class: bool) -> Members:
    members: Members = {}
    signatures: dict[str, list[tuple[Parameter, ...]]] = defaultdict(list)
    for node in body:
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if "property" in decorators or any(name.endswith(".setter") for name in decorators):
                members[node.name] = Function("attribute")
                continue
            parameters = from_arguments(node.args)
            if in_class and "staticmethod" not in decorators:
                parameters = parameters[1:]
            signatures[node.name].append(parameters)
            members[node.name] = Function("function", tuple(signatures[node.name]))
        elif isinstance(node, ast.ClassDef):
            members[node.name] = stub_members(node.body, True)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            members[node.target.id] = Function("attribute")
    return {name: member for name, member in members.items() if public(name)}


# --- what the module has


def split_outside_brackets(text: str) -> list[str]:
    parts, depth, quote, current = [], 0, "", ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{<":
            depth += 1
        elif character in ")]}>":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def from_docstring_line(line: str) -> tuple[Parameter, ...]:
    """Reads `name(arg0: int, *, key: str = 'x') -> None`, which pybind11 writes."""
    inside = line[line.index("(") + 1 : line.rindex(")", 0, line.rindex(" -> "))]
    found, keyword_only, positional_only_until = [], False, 0
    for text in split_outside_brackets(inside):
        if text == "*":
            keyword_only = True
        elif text == "/":
            positional_only_until = len(found)
        else:
            name = re.split(r"[:=]", text, maxsplit=1)[0].strip()
            if re.fullmatch(r"arg\d+", name):
                name = ""
            found.append(Parameter(name, keyword_only, " = " in text))
    return tuple(item._replace(name="") if index < positional_only_until else item for index, item in enumerate(found))


def from_docstring(name: str, doc: str) -> tuple[tuple[Parameter, ...], ...]:
    lines = doc.splitlines()
    if "Overloaded function." in lines[:2]:
        numbered = [line for line in lines if re.match(rf"\d+\. {re.escape(name)}\(", line)]
        return tuple(from_docstring_line(line) for line in numbered)
    return (from_docstring_line(lines[0]),)


def module_members(owner: Any, in_class: bool) -> Members:
    members: Members = {}
    for name, value in vars(owner).items():
        if not public(name) or (name == "__init__" and not (value.__doc__ or "").startswith("__init__(")):
            continue  # The latter is Python's own, of a class that cannot be made.
        if isinstance(value, type):
            members[name] = module_members(value, True)
        elif isinstance(value, (types.BuiltinFunctionType, staticmethod)) or type(value).__name__ in {
            "instancemethod",
            "pybind11_static_method",
            "method_descriptor",
        }:
            function = value.__func__ if isinstance(value, staticmethod) else value
            doc = function.__doc__ or ""
            signatures = from_docstring(name, doc)
            if in_class and not isinstance(value, staticmethod):
                signatures = tuple(parameters[1:] for parameters in signatures)
            members[name] = Function("function", signatures)
        elif not isinstance(value, types.ModuleType):
            members[name] = Function("attribute")
    return members


STUBBED = stub_members(ast.parse(STUB.read_text(encoding="utf-8")).body, False)
COMPILED = module_members(core, False)


def flat(members: Members, prefix: str = "") -> dict[str, Function]:
    found = {}
    for name, member in members.items():
        if isinstance(member, dict):
            found[prefix + name] = Function("class")
            found.update(flat(member, f"{prefix}{name}."))
        else:
            found[prefix + name] = member
    return found


def test_module_has_members() -> None:
    """The reading itself works: an empty comparison would prove nothing."""
    assert any(member.kind == "function" for member in flat(COMPILED).values())


def test_every_compiled_name_is_in_the_stub() -> None:
    assert sorted(set(flat(COMPILED)) - set(flat(STUBBED))) == []


def test_every_stub_name_is_in_the_module() -> None:
    assert sorted(set(flat(STUBBED)) - set(flat(COMPILED))) == []


@pytest.mark.parametrize("name", sorted(set(flat(COMPILED)) & set(flat(STUBBED))))
def test_signature(name: str) -> None:
    assert flat(STUBBED)[name] == flat(COMPILED)[name]
