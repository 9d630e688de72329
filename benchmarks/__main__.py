"""`python -m benchmarks transformer|moe|pipeline|cases|micro|compile [options]`."""

from __future__ import annotations

import argparse
import sys

from shardwise.demo import devices


def main(argv: list[str] | None = None) -> int:
    devices.start(8)
    # These import jax.numpy and build arrays: after the devices are there.
    from benchmarks import (
        case_studies,
        cases,
        compiling,
        micro,
        moe,
        moe_scale,
        moe_tpu,
        pipeline,
        placement,
        tpu,
        transformer,
        unet,
    )

    commands = {
        "transformer": (transformer, "training step of a dense Transformer, beside jax.jit"),
        "moe": (moe, "training step of mixture-of-experts layers, beside jax.jit"),
        "pipeline": (pipeline, "training step of a pipelined Transformer, beside jax.jit"),
        "cases": (cases, "programs of user reports: right numbers, none refused"),
        "micro": (micro, "one operator each: bytes beside the best known plan"),
        "compile": (compiling, "planning time: depth, and 8 against 65,536 devices"),
        "tpu": (tpu, "the 64B Transformer compiled for 2048 TPU cores, with no TPU (jax[tpu])"),
        "moe-scale": (moe_scale, "an MoE layer's cost as experts and devices grow from 8 to 2048"),
        "moe-tpu": (
            moe_tpu,
            "GShard's 600B model compiled for 2048 TPU cores, with no TPU (jax[tpu])",
        ),
        "case-studies": (
            case_studies,
            "the configurations of GSPMD's section 5: planned, and compiled for TPU v3 (jax[tpu])",
        ),
        "unet": (unet, "Table 8: a 3D U-Net split in space, 1 to 32 ways"),
        "placement": (placement, "annotations dropped or moved: what the plan makes of it"),
    }
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    sub = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in commands.items():
        p = sub.add_parser(name, help=text, description=text)
        p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        module.add_arguments(p)
    args = parser.parse_args(argv)
    commands[args.command][0].run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
