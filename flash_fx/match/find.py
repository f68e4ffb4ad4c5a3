"""Find every attention of a twin: anchor on a softmax, walk to the score product and to the value products.

A softmax that does not stand between two batched products is no site and is not mentioned. Everything else is either
a Site or a Reject with the deciding node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..reject import Reason, Reject
from . import aten as table
from .lift import lift_site
from .normalize import Twin, resembles_softmax
from .shapes import UnknownSizeError
from .site import Site
from .softmax import canonicalise


@dataclass(frozen=True)
class Found:
    """One attention: its softmax, its value product, and the verdict. `covered` are the nodes a Site stands for."""

    anchor: Node
    product: Node
    verdict: Site | Reject
    covered: frozenset[Node] = frozenset()


def find_sites(twin: Twin) -> list[Found]:
    """All attentions in graph order."""
    canonicalise(twin)
    live = _live(twin)
    found = []
    for anchor in twin.graph.nodes:
        if anchor.target in table.SOFTMAX and anchor in live:
            products = [p for p in _value_products(anchor) if p[0] in live]
            scores = _score_products(anchor)
            if products and scores:
                verdicts = [_judge(twin, live, anchor, product, position, scores) for product, position in products]
                found += _all_or_none(verdicts)
    return found


def _all_or_none(verdicts: list[Found]) -> list[Found]:
    """Weights that one product still needs as a matrix are needed, so the other products of the same softmax stay too."""
    left = [f for f in verdicts if isinstance(f.verdict, Reject)]
    if not left and len(verdicts) > 1 and any(isinstance(f.verdict, Site) and f.verdict.program.drop for f in verdicts):
        shared = Reject(Reason.DROPOUT, verdicts[0].anchor, "one dropout feeds several value products")
        return [Found(f.anchor, f.product, shared) for f in verdicts]
    if not left:
        return verdicts
    needed = Reject(Reason.WEIGHTS_USED, left[0].product, "by a matrix product that is left alone")
    return [f if isinstance(f.verdict, Reject) else Found(f.anchor, f.product, needed) for f in verdicts]


def has_softmax(graph: Any) -> bool:
    """A quick look at any graph, before a twin is made: does anything in it resemble a softmax between two products?"""
    names = [
        str(n.target) if n.op == "call_method" else str(getattr(n.target, "__name__", n.target)) for n in graph.nodes
    ]
    if any("softmax" in n or n.startswith("multi_head_attention") for n in names):
        return True
    by_hand = any(n.split(".")[0] in ("sum", "logsumexp", "log_softmax") for n in names)
    exponential = by_hand and any(resembles_softmax(n) for n in graph.nodes)
    return exponential or any(_has_softmax_module(n) for n in graph.nodes if n.op == "call_module")


def _has_softmax_module(node: Node) -> bool:
    module = node.graph.owning_module.get_submodule(str(node.target))
    return any("softmax" in type(m).__name__.lower() for m in module.modules())


def _judge(twin: Twin, live: set[Node], anchor: Node, product: Node, position: int, scores: list[Node]) -> Found:
    verdict: Reject | None = None
    for score_product in scores:
        try:
            site, covered = lift_site(twin, anchor, product, position, score_product)
            _check_unused_elsewhere(twin, live, covered, anchor, product)
            return Found(anchor, product, site, frozenset(covered))
        except Reject as r:
            verdict = verdict or r
        except UnknownSizeError as e:
            verdict = verdict or Reject(Reason.SCORE, anchor, f"size {e}")
    assert verdict is not None
    return Found(anchor, product, verdict)


def _live(twin: Twin) -> set[Node]:
    live: set[Node] = set()
    stack = list(twin.roots)
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)
    return live


def _value_products(anchor: Node) -> list[tuple[Node, int]]:
    """(product, position of the weights in it), nearest first."""
    out, seen, queue = [], {anchor}, [anchor]
    while queue:
        node = queue.pop(0)
        for user in node.users:
            if user.target is table.BMM:
                out.append((user, 0 if user.args[0] is node else 1))
            elif user not in seen and table.name_of(user) in table.TRANSPARENT and _carries(node, user):
                seen.add(user)
                queue.append(user)
    return list(dict.fromkeys(out))


def _score_products(anchor: Node) -> list[Node]:
    """Batched products the softmax input is made of, nearest first."""
    out: list[Node] = []
    seen: set[Node] = set()
    queue = list(anchor.all_input_nodes)
    while queue:
        node = queue.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if node.target is table.BMM:
            out.append(node)
        elif table.name_of(node) in table.TRANSPARENT and table.name_of(node) not in table.SHAPE_ONLY:
            queue.extend(node.all_input_nodes)
    return out


def _carries(node: Node, user: Node) -> bool:
    return table.name_of(user) not in table.SHAPE_ONLY


def _check_unused_elsewhere(twin: Twin, live: set[Node], covered: set[Node], anchor: Node, product: Node) -> None:
    """Whatever the site stands for must not be read by anybody else, other than another value product."""
    others = {p for p, _ in _value_products(anchor)} | {product}
    for node in covered:
        if node in twin.roots:
            raise Reject(Reason.WEIGHTS_USED, node, "returned, or read by an opaque operation")
        for user in node.users:
            inside = user in covered or user in others or user not in live
            if not inside and table.name_of(user) not in table.SHAPE_ONLY and not _feeds_only(user, others, live):
                raise Reject(Reason.WEIGHTS_USED, user, f"by {table.name_of(user) or user.name}")


def _feeds_only(node: Node, products: set[Node], live: set[Node]) -> bool:
    """True if every live path from the node ends in one of the products."""
    if node in products:
        return True
    if table.name_of(node) not in table.TRANSPARENT or not node.users:
        return False
    return all(_feeds_only(u, products, live) for u in node.users if u in live)
