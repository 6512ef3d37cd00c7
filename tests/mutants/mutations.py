"""Mutants of functions: mutmut's operators, each applied to one node of one module.

What a test should not notice is not changed: type annotations, decorators, defaults of parameters, calls of a logger
(also of a warning), the wording of errors, and the case of a string's letters. Code outside of functions runs once, at
the import, and is not changed either.
"""

import difflib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

LEFT_OUT_CALLS = frozenset({"isinstance", "cast", "len", "super"})
LOG_METHODS = frozenset({"critical", "debug", "error", "exception", "info", "log", "warn", "warning"})


class Mutant(NamedTuple):
    """One change of one function."""

    module: str
    number: int
    """Its place among the mutants of the module, in the order of the source."""
    function: str
    """Name within the module, as in `Class.method`; of a function in a function the outer one."""
    function_line: int
    """First line of the function, that of its first decorator."""
    lines: tuple[int, ...]
    """Lines of the changed node and of its statement: a test that runs none of them cannot notice the change."""
    change: str
    """The lines before and after, in one line."""
    source: str
    """The changed module."""

    @property
    def key(self) -> str:
        """Name among the mutants of an unchanged source."""
        return f"{self.module}:{self.number}"


class _Site(NamedTuple):
    original: cst.CSTNode
    mutated: cst.CSTNode
    function: str
    function_line: int
    lines: tuple[int, ...]


class _Sites(cst.CSTVisitor):
    """Collects the places of a module that can be mutated."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[_Site] = []
        self._names: list[str] = []
        self._functions: list[cst.FunctionDef] = []
        self._outer: tuple[str, int] | None = None
        self._statement_lines: list[int] = []
        self._raises = 0

    def _line(self, node: cst.CSTNode) -> int:
        # Not every operator has a position of its own, but its statement has one.
        position = self.get_metadata(PositionProvider, node, None)
        return int(position.start.line) if position else self._statement_lines[-1]

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_out(node):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._names.append(node.name.value)
        if isinstance(node, cst.FunctionDef):
            if not self._functions:
                first = node.decorators[0] if node.decorators else node
                self._outer = (".".join(self._names), self._line(first))
            self._functions.append(node)
        if isinstance(node, cst.BaseStatement):
            self._statement_lines.append(self._line(node))
        self._raises += isinstance(node, cst.Raise)
        if self._outer is not None:
            self._add_sites(node, *self._outer)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if _is_left_out(original_node):
            return
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._names.pop()
        if isinstance(original_node, cst.FunctionDef):
            self._functions.pop()
            if not self._functions:
                self._outer = None
        if isinstance(original_node, cst.BaseStatement):
            self._statement_lines.pop()
        self._raises -= isinstance(original_node, cst.Raise)

    def _add_sites(self, node: cst.CSTNode, function: str, function_line: int) -> None:
        for kind, operator in mutation_operators:
            if not isinstance(node, kind):
                continue
            for mutated in operator(node):
                if isinstance(node, cst.SimpleString) and (self._raises or not _is_marked(mutated)):
                    continue
                lines = tuple(dict.fromkeys((self._line(node), self._statement_lines[-1])))
                self.sites.append(_Site(node, mutated, function, function_line, lines))


def _is_marked(mutated: cst.CSTNode) -> bool:
    """Return whether a string was put between marks, instead of changing its case."""
    return isinstance(mutated, cst.SimpleString) and "XX" in mutated.value


def _is_left_out(node: cst.CSTNode) -> bool:
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Parameters() | cst.ImportFrom() | cst.Import():
            return True
        case cst.Call(func=cst.Name(value=name)):
            return name in LEFT_OUT_CALLS
        case cst.Call(func=cst.Attribute(value=cst.Name(value=name), attr=cst.Name(value=method))):
            return method in LOG_METHODS and name.lower().lstrip("_") in ("log", "logger", "logging", "warnings")
        case _:
            return False


def _one_line(lines: Iterable[str], sign: str) -> str:
    return " ".join(line[1:].strip() for line in lines if line.startswith(sign))


def _change(before: str, after: str) -> str:
    diff = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    return f"{_one_line(diff, '-')}  =>  {_one_line(diff, '+')}"


class MutableModule:
    """A module's source and its possible mutants."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self._text = text
        wrapper = MetadataWrapper(cst.parse_module(text))
        visitor = _Sites()
        wrapper.visit(visitor)
        self._tree = wrapper.module
        self._sites = visitor.sites

    def __len__(self) -> int:
        return len(self._sites)

    def mutant(self, number: int) -> Mutant | None:
        """Return the mutant of this number; None if it changes nothing or breaks the syntax."""
        site = self._sites[number]
        tree = self._tree.deep_replace(site.original, site.mutated)
        assert isinstance(tree, cst.Module)
        try:
            compile(tree.code, self.path, "exec")
        except SyntaxError:
            return None
        if tree.code == self._text:
            return None
        change = _change(self._text, tree.code)
        return Mutant(self.path, number, site.function, site.function_line, site.lines, change, tree.code)


def drawn(modules: Sequence[MutableModule], seed: int, count: int) -> Iterator[Mutant]:
    """Draw up to `count` mutants; a smaller count gives the first ones of a greater."""
    choices = [(module, number) for module in modules for number in range(len(module))]
    random.Random(seed).shuffle(choices)
    mutants = (module.mutant(number) for module, number in choices)
    return itertools.islice((mutant for mutant in mutants if mutant), count)
