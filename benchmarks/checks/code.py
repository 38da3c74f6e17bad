"""Python code without what cannot change a measurement: comments, docstrings, help, messages, types of result files."""

from __future__ import annotations

import ast
from functools import cache

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
