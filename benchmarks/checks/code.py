"""Python code without what cannot change a measurement: refusals, comments, docstrings, help, types of result files."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

_REPORTS = {"print", "echo", "warn", "warning", "info", "debug", "log"}
"""Functions whose arguments a person reads."""
_HELP = {"help", "description", "prog", "epilog"}
"""Keyword arguments whose values a person reads."""
_RESULT_FILES = ("benchmarks.kinds", "benchmarks.names", "benchmarks.results")
"""Modules that keep what was measured and take no part in measuring it."""


@cache
def essence(source: str, function: str | None = None, without: str | None = None) -> str:
    """The code of a module, or of one of its functions or classes, in a form that messages do not change.

    `without` names a function or class that is left out.
    """
    tree = _Essence().visit(ast.parse(source))
    tree.body = [node for node in tree.body if without is None or getattr(node, "name", None) != without]
    if function is not None:
        found = [node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == function]
        tree = ast.Module(body=found, type_ignores=[])  # type: ignore[arg-type]
    return ast.dump(tree)


class _Essence(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        """Without refusals: a run that was measured to its end went past every one of them."""
        if not node.orelse and all(isinstance(one, ast.Raise) for one in node.body):
            return None
        return _filled(self.generic_visit(node))

    def visit_For(self, node: ast.For) -> ast.AST | None:
        return _unless_empty(self.generic_visit(node))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return _unless_empty(self.generic_visit(node))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return _filled(self.generic_visit(node))

    def visit_With(self, node: ast.With) -> ast.AST:
        return _filled(self.generic_visit(node))

    def visit_Try(self, node: ast.Try) -> ast.AST:
        return _filled(self.generic_visit(node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if (node.module or "").startswith(_RESULT_FILES) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return ast.Pass()  # a docstring, of whatever it stands behind
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return _Silent().visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.msg = None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _REPORTS:
            return _Silent().visit(node)
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in _HELP]
        return self.generic_visit(node)


def _filled(node: Any) -> ast.AST:
    """The node with a body, from which everything may have been taken."""
    node.body = node.body or [ast.Pass()]
    return node


def _unless_empty(node: Any) -> ast.AST | None:
    """The node; None if it does nothing, which leaves a loop or a function of refusals alone."""
    empty = all(isinstance(one, ast.Pass) for one in node.body) and not getattr(node, "orelse", [])
    return None if empty else _filled(node)


class _Silent(_Essence):
    """Without any text."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.generic_visit(node)
