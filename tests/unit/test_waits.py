"""Every wait of the product ends: by itself after a time, or as docs/waits.md says, which names who ends it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "paramserver"
TABLE = ROOT.parent / "docs/waits.md"
# Generated code; the simulator, whose time is its own; what tests do to the product.
APART = ("v1", "simulate", "testing")
# Calls that return when somebody else has done something.
WAITS = {"wait", "wait_for", "acquire", "result", "communicate", "accept", "recv", "readline"}
LIMITED = {"timeout", "timeout_at", "settimeout"}


def waits_of(tree: ast.AST, name: str) -> Iterator[str]:
    """``name:function`` for every wait that has no limit of its own."""
    yield from _walk(tree, name, "", False, False)


def _walk(node: ast.AST, name: str, function: str, limited: bool, coroutine: bool) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside, bound, loop = function, limited, coroutine
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{function}.{child.name}".lstrip(".")
            bound, loop = False, isinstance(child, ast.AsyncFunctionDef)
        elif isinstance(child, ast.With | ast.AsyncWith):
            bound = limited or any(_called(item.context_expr) in LIMITED for item in child.items)
        elif (isinstance(child, ast.While) and not bound and _sleeps(child)) or (
            isinstance(child, ast.Call) and not bound and _waits(child, coroutine)
        ):
            yield f"{name}:{function}"
        yield from _walk(child, name, inside, bound, loop)


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _sleeps(loop: ast.While) -> bool:
    """It goes round with pauses, and not only until a deadline."""
    until = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    return "deadline" not in until and any(_called(node) == "sleep" for node in ast.walk(loop))


def _waits(call: ast.Call, coroutine: bool) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in WAITS | {"join"}:
        return False
    what = call.func.attr
    if any(word.arg == "timeout" for word in call.keywords):
        return False
    if what == "result" and coroutine:  # of a future of the loop, which does not block
        return False
    own = isinstance(call.func.value, ast.Name) and call.func.value.id in ("asyncio", "futures")
    if what == "join":  # of a thread; a string or a path is given something
        return (
            not call.args and not isinstance(call.func.value, ast.Constant) and "thread" in ast.unparse(call.func.value)
        )
    if what == "wait_for":
        return len(call.args) < 2
    if what in ("wait", "result", "acquire", "accept"):
        return own or not call.args
    return True


def all_waits() -> dict[str, int]:
    found: dict[str, int] = {}
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.parts[0] in APART and place.name != "chaos.py":
            continue
        for wait in waits_of(ast.parse(path.read_text()), str(place)):
            found[wait] = found.get(wait, 0) + 1
    return found


def said() -> dict[str, str]:
    """Who ends each, by the table."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return {wait.strip("`"): why for wait, why in rows}


def test_every_wait_has_a_limit_or_somebody_who_ends_it() -> None:
    found, ends = all_waits(), said()
    new = sorted(found.keys() - ends.keys())
    assert not new, f"give these a limit, or say in docs/waits.md who ends them, and by what sentence: {new}"
    gone = sorted(ends.keys() - found.keys())
    assert not gone, f"these are no waits any more; take them out of docs/waits.md: {gone}"
    assert all(len(why.split()) >= 4 for why in ends.values())


def test_the_search_finds_waits() -> None:
    """The test above can fail."""
    text = """
class Somebody:
    async def by_an_event(self):
        await self.event.wait()
    async def by_a_loop(self):
        while not self.there():
            await asyncio.sleep(1)
    async def by_a_condition(self):
        await self.changed.wait_for(self.there)
    def by_a_thread(self):
        self.thread.join()
    def by_a_future(self):
        return self.future.result()
    async def limited(self):
        async with asyncio.timeout(1):
            await self.event.wait()
        self.thread.join(1)
        self.future.result(1)
        await asyncio.wait([self.task], timeout=1)
        ", ".join(self.names)
        while time.monotonic() < deadline:
            await asyncio.sleep(1)
"""
    found = [wait.rpartition(".")[2] for wait in waits_of(ast.parse(text), "text")]
    names = ["by_an_event", "by_a_loop", "by_a_condition", "by_a_thread", "by_a_future"]
    assert found == names
