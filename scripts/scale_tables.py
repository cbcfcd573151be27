"""The computed tables of docs/scale.md: ViT-H/14, pre-trained as in the paper, on a cluster.

    python scripts/scale_tables.py

Everything follows from `vitrail plan` and from the assumptions below, which docs/scale.md states.
"""

import math

from vitrail.formatting import GIB, number
from vitrail.planning.plan import make_plan
from vitrail.planning.request import PlanRequest

RUN = {"model": "ViT-H/14", "images": 303e6, "epochs": 14, "batch_size": 4096}
FSDP = {"strategy": "fsdp", "precision": "bfloat16"}
DEVICES = (8, 64, 512)
PER_HOST = 8  # devices
# Per core and second, from benchmarks/README.md: images of 500 x 375 and of 2000 x 1500.
DECODED, DECODED_LARGE = 1796, 376
WRITTEN = 1e9  # bytes of state per second, all processes together
# 419 failures in 54 days of 16,384 GPUs: Grattafiori et al. 2024 (arXiv:2407.21783), section 3.3.4
SECONDS_BETWEEN_FAILURES = 16_384 * 54 * 86_400 / 419  # of one device
RESTART = 600.0  # seconds


def plan(devices: int, micro_batch: int) -> dict:
    request = PlanRequest(**RUN, **FSDP, devices=devices, micro_batch=micro_batch)
    return make_plan(request, measure=False).to_dict()


def show(*rows: list[str]) -> None:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    print("\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]), end="\n\n")


def main() -> None:
    many, more = plan(64, micro_batch=32), plan(512, micro_batch=8)
    accelerators, utilization = many["accelerators"], many["utilization"]

    rows = []
    for one in accelerators:
        days = [number(one["device_days"] / n) for n in (1, 64, 512)]
        rate = PER_HOST * one["peak"] * utilization / many["flops"]["training"]
        cores = [str(math.ceil(rate / decoded)) for decoded in (DECODED, DECODED_LARGE)]
        rows.append([one["name"], f"{one['peak'] / 1e12:,.4g}", *days, f"{rate:,.0f}", *cores])
    head = ["accelerator", "peak, TFLOP/s", "device-days", "64 devices", "512 devices"]
    show([*head, "images/s", "cores", "cores (large)"], *rows)

    parts = [
        made["memory"]["parts"] | {"total": made["memory"]["tensors"]} for made in (many, more)
    ]
    heads = [
        f"{made['devices']} devices, {made['accumulate']} x {made['micro_batch']} images"
        for made in (many, more)
    ]
    rows = [
        [name, *(f"{part[name] / GIB:,.2f}" for part in parts)]
        for name in parts[0]
        if parts[0][name]
    ]
    show(["GiB per device", *heads], *rows)

    whole, rows = many["memory"]["whole"], []
    write = (whole["weights"] + whole["optimizer"]) / WRITTEN
    for devices in DEVICES:
        between = SECONDS_BETWEEN_FAILURES / devices
        interval = math.sqrt(2 * write * between)
        lost = write / interval + (interval / 2 + RESTART) / between
        row = [str(devices), f"{between / 3600:,.0f}", f"{interval / 60:,.0f}", f"{lost:.2%}"]
        rows.append(row)
    show(["devices", "hours between failures", "`--save-minutes`", "time lost"], *rows)


if __name__ == "__main__":
    main()
