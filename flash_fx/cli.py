"""The command line: `flash-fx demo`, `flash-fx explain MODULE:CALLABLE` and `flash-fx bench`.

Exit codes: 0 done; 1 nothing was fused and --strict was given; 2 a usage error or a target that cannot be explained.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import TargetError
from .version import __version__

EXPLAIN_EXAMPLES = """\
examples:
  flash-fx explain examples.mingpt:build
  flash-fx explain mymodel:attention --shape 2,8,256,64 --shape 2,8,256,64 --shape 2,8,256,64
  flash-fx explain mymodel:Net --shape 2,128:int64 --train --json

CALLABLE is a function or an nn.Module (instance, or class built without arguments) that takes the --shape tensors, or
a factory that takes nothing and returns (model, args) or (model, kwargs).

exit code: 0 explained, 1 nothing fused under --strict, 2 bad usage or target
"""

DEMO_EXAMPLES = """\
examples:
  flash-fx demo
  flash-fx demo --model llama --seq 1024 4096 --dtype bfloat16
"""


BENCH_EXAMPLES = """\
examples:
  flash-fx bench
  flash-fx bench --seq 512 2048 8192 --plot cost.svg --csv cost.csv
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse exits with 2 by itself on a usage error."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except TargetError as e:
        print(f"flash-fx: error: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe is done
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def explain(arguments: argparse.Namespace) -> int:
    """`flash-fx explain`: capture, match and print; compiles nothing."""
    import torch

    from .explaining import explain as explain_call
    from .target import load_call, one_line

    call = load_call(arguments.target, arguments.shape, arguments.dtype)
    _prepare(call.fn, call.args, arguments.train)
    try:
        with torch.set_grad_enabled(arguments.train):
            report = explain_call(call.fn, *call.args, **call.kwargs)
    except Exception as e:  # whatever the user's code does
        raise TargetError(f"{arguments.target} failed: {one_line(e)}") from e
    print(report.to_json() if arguments.json else report)
    return 1 if arguments.strict and report.fused == 0 else 0


def demo(arguments: argparse.Namespace) -> int:
    """`flash-fx demo`."""
    from .demo import run

    return run(arguments.model, arguments.seq, arguments.dtype, arguments.steps)


def bench(arguments: argparse.Namespace) -> int:
    """`flash-fx bench`."""
    from .bench import run

    return run(arguments.seq, arguments.dtype, arguments.plot, arguments.csv, arguments.repeats)


def _prepare(fn: Any, args: tuple, train: bool) -> None:
    import torch

    if isinstance(fn, torch.nn.Module):
        fn.train(train)
    for a in args:
        if train and isinstance(a, torch.Tensor) and a.is_floating_point() and a.is_leaf:
            a.requires_grad_()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flash-fx",
        description="Find hand-written attention in torch.compile graphs and replace it with flash attention.",
    )
    parser.add_argument("--version", action="version", version=f"flash-fx {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="{demo,explain,bench}")

    p = _command(
        commands, "explain", explain, "show what would be fused in a model, and what not and why", EXPLAIN_EXAMPLES
    )
    p.add_argument("target", metavar="MODULE:CALLABLE", help="what to explain; the current folder is importable")
    p.add_argument(
        "--shape", nargs="+", action="extend", default=[], metavar="SIZES",
        help="a random input, such as 2,4,128,64 or 2,128:int64; once for each tensor",
    )  # fmt: skip
    p.add_argument("--dtype", default="float32", help="dtype of inputs that name none (default: float32)")
    p.add_argument(
        "--train", action="store_true", help="capture for training: train() and gradients on (default: inference)"
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--strict", action="store_true", help="exit with 1 if nothing is fused")

    p = _command(
        commands, "demo", demo, "compile a model; compare it with eager and stock torch.compile", DEMO_EXAMPLES
    )
    p.add_argument(
        "--model", choices=("gpt2", "mingpt", "llama", "bert"), help="default: gpt2 with transformers, else mingpt"
    )
    p.add_argument(
        "--seq", type=_positive, nargs="+", metavar="N", help="lengths (default: 1024..8192 on CUDA, 512 on the CPU)"
    )
    p.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on CUDA, else float32"
    )
    p.add_argument(
        "--steps", type=_positive, default=None, metavar="N", help="timed steps (default: 20 on CUDA, 10 on the CPU)"
    )

    p = _command(
        commands, "bench", bench, "measure how time and memory of an attention grow with its length", BENCH_EXAMPLES
    )
    p.add_argument(
        "--seq",
        type=_positive,
        nargs="+",
        metavar="N",
        help="lengths (default: 512 to 131072 on CUDA, 128 to 1024 on the CPU)",
    )
    p.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on CUDA, else float32"
    )
    p.add_argument("--repeats", type=_positive, default=5, metavar="N", help="timed steps of each point (default: 5)")
    p.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw both on logarithmic axes; the suffix is the format (needs matplotlib)",
    )
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the numbers")
    return parser


def _command(commands: Any, name: str, function: Any, text: str, examples: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(command=function)
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)
