"""Find every attention of a twin: anchor on a softmax, walk to the score product and to the value products.

A softmax that does not stand between two batched products is no site and is not mentioned. Everything else is either
a Site or a Reject with the deciding node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..reject import Reason, Reject
from . import aten as table
from .join import join_products
from .lift import lift_site
from .near import hides_softmax, names_softmax, unseen
from .normalize import Twin, closure, is_product, resembles_softmax, target_name
from .shapes import UnknownSizeError
from .site import Site
from .softmax import canonicalise, quotient
from .unfold import unfold_rows


@dataclass(frozen=True)
class Found:
    """One attention: its softmax, its value product, and the verdict. `covered` are the nodes a Site stands for.

    The two are nodes of the twin, or of the user's graph where the twin does not show the attention.
    """

    anchor: Node
    product: Node
    verdict: Site | Reject
    covered: frozenset[Node] = frozenset()


def find_sites(twin: Twin) -> list[Found]:
    """All attentions in graph order."""
    canonicalise(twin)
    join_products(twin)
    unfold_rows(twin)
    live = closure([*twin.roots, *(s for s in twin.sinks.values() if isinstance(s, Node))], _values_read)
    found: list[Found] = []
    for anchor in twin.graph.nodes:
        if anchor.target in table.SOFTMAX and anchor in live:
            products = [p for p in _value_products(anchor) if p[0] in live]
            scores = _score_products(anchor)
            if products and scores:
                found += _one_dropout_each([_judge(twin, anchor, *product, scores) for product in products])
            elif (near := _near_miss(twin, anchor, live)) is not None:
                found.append(near)
    found += _exponentials(live, twin.graph.nodes, {f.product for f in found})
    hidden = [Found(*near) for near in unseen(twin, [f.anchor for f in found])]
    return _settle(twin, live, found) + hidden


def _values_read(node: Node) -> list[Node]:
    return [] if table.name_of(node) in table.SHAPE_ONLY else node.all_input_nodes


def _one_dropout_each(found: list[Found]) -> list[Found]:
    """Every call of the operator draws its own bits."""
    if len(found) > 1 and any(isinstance(f.verdict, Site) and f.verdict.program.drop for f in found):
        shared = Reject(Reason.DROPOUT, found[0].anchor, "one dropout feeds several value products")
        return [f if isinstance(f.verdict, Reject) else Found(f.anchor, f.product, shared) for f in found]
    return found


def _settle(twin: Twin, live: set[Node], found: list[Found]) -> list[Found]:
    """Reject sites whose scores or weights somebody else needs, until all that is left can go together."""
    while True:
        sites = [f for f in found if isinstance(f.verdict, Site)]
        replaced = {f.product for f in sites}.union(*(f.covered for f in sites))
        settled = [_check_uses(twin, live, f, replaced) for f in found]
        if settled == found:
            return found
        found = settled


def has_softmax(graph: Any) -> bool:
    """A quick look at any graph, before a twin is made: does anything in it resemble a softmax between two products?"""
    names = [target_name(n) for n in graph.nodes]
    if any(names_softmax(n) or n.startswith("multi_head_attention") for n in names):
        return True
    if any(hides_softmax(n) for n in graph.nodes):
        return True
    by_hand = any(n.split(".")[0] in ("sum", "einsum", "logsumexp", "log_softmax", "normalize") for n in names)
    by_hand = by_hand or sum(map(is_product, graph.nodes)) > 1  # one with ones is a sum
    exponential = by_hand and any(resembles_softmax(n) for n in graph.nodes)
    return exponential or any(_has_softmax_module(n) for n in graph.nodes if n.op == "call_module")


def _has_softmax_module(node: Node) -> bool:
    module = node.graph.owning_module.get_submodule(str(node.target))
    return any("softmax" in type(m).__name__.lower() for m in module.modules())


def _judge(twin: Twin, anchor: Node, product: Node, position: int, scores: list[Node]) -> Found:
    verdict: Reject | None = None
    for score_product in scores:
        try:
            site, covered = lift_site(twin, anchor, product, position, score_product)
            return Found(anchor, product, site, frozenset(covered))
        except Reject as r:
            verdict = verdict or r
        except UnknownSizeError as e:
            verdict = verdict or Reject(Reason.SCORE, anchor, f"size {e}")
    assert verdict is not None
    return Found(anchor, product, verdict)


# *** walking ***


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


def _near_miss(twin: Twin, anchor: Node, live: set[Node]) -> Found | None:
    """A softmax between two products, with something on the way that no attention has."""
    after = _path_to_product(anchor, lambda n: [u for u in n.users if u in live])
    before = _path_to_product(anchor, lambda n: n.all_input_nodes)
    if after is None or before is None:
        return None
    for reason, path in ((Reason.WEIGHT, after[:-1]), (Reason.SCORE, before[:-1])):
        odd = next((n for n in path if table.name_of(n) not in table.TRANSPARENT), None)
        if odd is not None and (reason is Reason.WEIGHT or odd.target not in table.SOFTMAX):  # the other one says it
            return Found(anchor, after[-1], Reject(reason, odd, f"through {table.name_of(odd) or odd.name}"))
    return None


_TOTALS = frozenset({"sum", "mean", "linalg_vector_norm"})
_LINEAR = table.VIEWS | table.CASTS | {"add", "sub", "mul", "div", "clamp", "clamp_min", "maximum"}


def _exponentials(live: set[Node], nodes: Iterable[Node], reported: set[Node]) -> list[Found]:
    """Near misses: exponentials between two products, divided by a total of themselves, that became no softmax."""
    found: dict[Node, Found] = {}
    for e in nodes:
        if table.name_of(e) not in ("exp", "exp2") or e not in live:
            continue
        after = _path_to_product(e, lambda n: [u for u in n.users if u in live])
        before = _path_to_product(e, lambda n: n.all_input_nodes)
        if after is None or before is None or any(n.target in table.SOFTMAX for n in before + after):
            continue
        product = after[-1]
        divided = _subtracts_logarithm(e) or any(_divides_by_total(n, e) for n in after[:-1] + _views_of(product))
        if product not in reported and divided:
            verdict = Reject(Reason.EXPONENTIALS, e)
            found.setdefault(product, Found(e, product, verdict))
    return list(found.values())


def _views_of(product: Node) -> list[Node]:
    """Who reads the product, also by views and casts."""
    readers = [*product.users]
    for n in readers:  # grows while it is walked
        readers += n.users if table.name_of(n) in table.VIEWS | table.CASTS else ()
    return readers


def _divides_by_total(node: Node, exponential: Node) -> bool:
    """Is it a quotient with a sum over these exponentials in its denominator, or a product, as with ones?"""
    parts = quotient(node)
    if parts is None:
        return False
    totals = [n for n in closure([parts[1]]) if table.name_of(n) in _TOTALS]
    products = [a for n in _linear_in([parts[1]]) if n.target is table.BMM for a in n.all_input_nodes]
    return exponential in _linear_in(products) or any(exponential in closure([n]) for n in totals)


def _subtracts_logarithm(exponential: Node) -> bool:
    """Is it exp(x - log(sum(..))), the quotient written in the exponent?"""
    logarithms = [n for n in _linear_in(exponential.all_input_nodes) if table.name_of(n) in ("log", "logsumexp", "logaddexp")]
    return any(table.name_of(n) in _TOTALS | {"logsumexp"} for n in closure(logarithms))


def _linear_in(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and what they are sums and multiples of."""
    return closure(nodes, lambda n: n.all_input_nodes if table.name_of(n) in _LINEAR else ())


def _path_to_product(start: Node, following: Callable[[Node], Iterable[Node]]) -> list[Node] | None:
    """The nodes from `start` to the nearest batched product, `start` left out, the product last."""
    came_from: dict[Node, Node] = {start: start}
    queue = [start]
    for node in queue:  # grows while it is walked
        for n in following(node):
            if n in came_from or table.name_of(n) in table.SHAPE_ONLY:
                continue
            came_from[n] = node
            if n.target is table.BMM:
                path = [n]
                while came_from[path[-1]] is not start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            queue.append(n)
    return None


# *** who else reads it ***


def _check_uses(twin: Twin, live: set[Node], found: Found, replaced: set[Node]) -> Found:
    """A Reject where a live node outside of what is replaced reads scores or weights of the site."""
    if isinstance(found.verdict, Reject):
        return found
    for node in found.covered:
        if node in twin.roots:
            return _needed(found, node, "returned, or read by an opaque operation")
        for user in node.users:
            if user in live and user not in replaced and table.name_of(user) not in table.SHAPE_ONLY:
                left = user.target is table.BMM
                by = "a matrix product that is left alone" if left else table.name_of(user) or user.name
                return _needed(found, user, f"by {by}")
    return found


def _needed(found: Found, node: Node, detail: str) -> Found:
    return Found(found.anchor, found.product, Reject(Reason.WEIGHTS_USED, node, detail))
